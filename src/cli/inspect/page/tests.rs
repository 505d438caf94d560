use super::*;

/// A video of two frames with slices, and one without slices.
#[test]
fn names_of_frames_and_slices_count_those_of_their_video() {
    let patches = |frames, continues_medium| Patches {
        pixel_values: Vec::new(),
        grid_thw: [frames, 2, 2],
        kind: MediumKind::Video,
        continues_medium,
    };
    let all = [(1, false, 0), (3, true, 1), (1, true, 2), (3, true, 3), (2, false, 0)];
    let all = all.map(|(frames, continues_medium, part)| (patches(frames, continues_medium), part));
    let media: Vec<_> =
        all.iter().map(|(patches, part)| ShownMedium { patches, rows: &[], part: *part }).collect();
    let grids = "[2, 2, 2] with slices [6, 2, 2], [2, 2, 2]";
    assert_eq!(described(&media, MediumKind::Video), grids);
    assert_eq!(described(&media, MediumKind::Image), "");
    let place = |index, group| {
        let figure = Figure { media: &media, index, group, max_pixels: 1, boxes: &[] };
        figure.place_in_video()
    };
    assert_eq!(place(0, 0), "frame 1 of 2");
    assert_eq!(place(1, 2), "frame 1, slice 3 of 3");
    assert_eq!(place(2, 0), "frame 2 of 2");
    assert_eq!(place(3, 0), "frame 2, slice 1 of 3");
    assert_eq!(place(4, 1), "group 2 of 2");
    let late = ShownMedium { patches: &all[1].0, rows: &[], part: 2 * MAX_GROUPS + 1 };
    assert_eq!([&media[1], &late].map(ShownMedium::num_shown), [3, 0]);
}

#[test]
fn a_turn_begins_where_the_template_begins_one() {
    let mut out = String::new();
    let mut turns = Turns { out: &mut out, open: false };
    turns.text("<|im_start|>user\nHi<b><|im_end|>\n<|im_start|>assistant\n", Fate::Kept);
    turns.target("Yes", 1);
    turns.target("\u{e9}", 2);
    turns.text(" No<|im_end|>\n<|im_start|>user\n", Fate::Cut);
    turns.close();
    assert_eq!(
        out,
        "<section class=\"turn user\"><h4>user</h4><div>Hi&lt;b&gt;<span class=\"sp\">&lt;|im_end|&gt;</span>\n</div></section>\n\
         <section class=\"turn assistant\"><h4>assistant</h4><div><mark>Yes</mark><mark data-tokens=\"2\">\u{e9}</mark><span class=\"cut\"> No<span class=\"sp\">&lt;|im_end|&gt;</span>\n</span></div></section>\n\
         <section class=\"turn user gone\"><h4>user</h4><div></div></section>\n"
    );
}

#[test]
fn dropped_tokens_return_to_their_places() {
    let runs = vec![('a', 0..3), ('b', 3..5), ('a', 5..6)];
    let cut = |before, id| DroppedTokens { before, ids: vec![id] };
    let dropped = [cut(0, 7), cut(2, 8), cut(3, 9), cut(6, 10)];
    let expected = [
        SamplePiece::Cut(&[7]),
        SamplePiece::Kept('a', 0..2),
        SamplePiece::Cut(&[8]),
        SamplePiece::Kept('a', 2..3),
        SamplePiece::Cut(&[9]),
        SamplePiece::Kept('b', 3..5),
        SamplePiece::Kept('a', 5..6),
        SamplePiece::Cut(&[10]),
    ];
    assert_eq!(pieces(runs.clone(), &dropped), expected);
    assert_eq!(num_tokens(&dropped), 4);
    let whole = runs.iter().map(|(run, range)| SamplePiece::Kept(*run, range.clone()));
    assert_eq!(pieces(runs.clone(), &[]), whole.collect::<Vec<_>>());
}
