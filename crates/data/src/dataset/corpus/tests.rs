use std::cell::RefCell;
use std::fs::File;
use std::io::Write;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::{ImageConfig, KeptEnd};
use batch::IGNORE_INDEX;
use fault::Fault;

fn encoder() -> Encoder {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/quickstart/model");
    Encoder::from_folder(&folder, &ImageConfig::default()).unwrap()
}

fn file(name: &str, text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    (folder, path)
}

fn config(text: &str) -> CorpusConfig {
    serde_json::from_str(text).unwrap()
}

const DOCUMENTS: &str = r#"{"sampling": "document"}"#;

fn open(path: &Path, text: &str, options: &CorpusOptions) -> Corpus {
    Corpus::open(&[path.to_owned()], &config(text), &encoder(), options, &|_, _| ()).unwrap()
}

fn all_ids(corpus: &Corpus) -> Vec<u32> {
    corpus.tokens.read(0, corpus.tokens.index.num_tokens).unwrap()
}

/// Tokenises each text on its own, without separators.
fn ids_of(texts: &[&str]) -> Vec<Vec<u32>> {
    let encoder = encoder();
    texts.iter().map(|text| encoder.encode_text(text).unwrap().ids).collect()
}

fn lines(corpus: &Corpus) -> Vec<u64> {
    corpus.rows().map(|row| corpus.id(row).line).collect()
}

#[test]
fn rows_are_documents_that_end_in_exactly_one_separator() {
    let rows = [
        r#"{"text": "One document."}"#,
        "",
        r#"{"text": "Another one.<|endoftext|>", "id": 7}"#,
        r#"{"text": "Two<|endoftext|>in a row"}"#,
    ];
    let (_folder, path) = file("a.jsonl", &rows.join("\n"));
    let corpus = open(&path, DOCUMENTS, &CorpusOptions::default());
    let end = encoder().token_id("<|endoftext|>").unwrap();
    let texts = ids_of(&["One document.", "Another one.", "Two", "in a row"]);
    let documents: Vec<Vec<u32>> = texts.into_iter().map(|ids| [ids, vec![end]].concat()).collect();
    assert_eq!(all_ids(&corpus), documents.concat());
    assert_eq!((corpus.num_documents(), corpus.len()), (4, 4));
    assert_eq!(lines(&corpus), [1, 3, 4, 4]);
    for (row, ids) in (0..).zip(&documents) {
        let sample = corpus.read(row).unwrap();
        assert_eq!(Length::of(&sample), corpus.length(row).unwrap());
        assert_eq!(&sample.input_ids, ids);
        assert_eq!(sample.segment_lengths(), [ids.len() as u32]);
        assert_eq!((sample.labels[0], sample.num_targets()), (IGNORE_INDEX, ids.len() - 1));
    }
}

#[test]
fn a_window_across_documents_has_a_segment_for_each() {
    let (_folder, path) =
        file("a.jsonl", "{\"text\": \"0123\"}\n{\"text\": \"456\"}\n{\"text\": \"78\"}\n");
    let text = r#"{"sampling": "sliding_window", "length": 6, "stride": 1}"#;
    let corpus = open(&path, text, &CorpusOptions::default());
    assert_eq!(corpus.num_tokens(), 5 + 4 + 3);
    assert_eq!(corpus.len(), 12 - 6);
    let segments: Vec<Vec<u32>> =
        corpus.rows().map(|row| corpus.read(row).unwrap().segment_lengths()).collect();
    assert_eq!(
        segments,
        [vec![5, 2], vec![4, 3], vec![3, 4], vec![2, 4, 1], vec![1, 4, 2], vec![4, 3]]
    );
    assert_eq!(lines(&corpus), [1, 1, 1, 1, 1, 2]);
    let length = Length { tokens: 7, ..Length::default() };
    assert_eq!(corpus.uniform_length(), Some(length));
    assert!(corpus.rows().all(|row| corpus.length(row).unwrap() == length));
    let bos = r#"{"sampling": "sliding_window", "length": 6, "bos_token": "<|im_start|>"}"#;
    let corpus = open(&path, bos, &CorpusOptions::default());
    let starts = encoder().token_id("<|im_start|>").unwrap();
    let ids = all_ids(&corpus);
    assert_eq!(ids.iter().filter(|id| **id == starts).count(), 3);
    assert_eq!((ids[0], ids.len()), (starts, 12));
    assert_eq!(corpus.read(0).unwrap().segment_lengths(), [5, 2]);
}

#[test]
fn a_text_file_is_one_text_whose_windows_have_line_numbers() {
    let text = "\u{feff}12\n34\n\n567\n89";
    let (_folder, path) = file("a.TXT", text);
    let corpus =
        open(&path, r#"{"sampling": "sliding_window", "length": 1}"#, &CorpusOptions::default());
    let end = encoder().token_id("<|endoftext|>").unwrap();
    let expected = [&ids_of(&["12\n34\n\n567\n89"])[0][..], &[end]].concat();
    assert_eq!(all_ids(&corpus), expected);
    // one window per digit and per run of newlines, which is one token; none for the last token
    assert_eq!(lines(&corpus), [1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 5, 5]);
    assert_eq!(corpus.num_documents(), 1);
}

#[test]
fn long_documents_are_split_and_documents_of_one_token_have_no_targets() {
    let (_folder, path) =
        file("a.jsonl", "{\"text\": \"0123456789\"}\n{\"text\": \"<|endoftext|>\"}\n");
    let split_at = NonZeroU32::new(4);
    let options = CorpusOptions { split_at, ..CorpusOptions::default() };
    let corpus = open(&path, DOCUMENTS, &options);
    let ids = all_ids(&corpus); // ten digits and two separators
    let samples: Vec<_> = (0..4).map(|row| corpus.read(row).unwrap().input_ids).collect();
    assert_eq!(samples, [&ids[0..4], &ids[3..7], &ids[6..10], &ids[9..11]]);
    assert_eq!(corpus.len(), 5);
    for result in [corpus.read(4).map(drop), corpus.length(4).map(drop)] {
        let error = result.unwrap_err();
        assert_eq!((error.reason(), error.id.line), ("no_supervised_token", 2));
    }
    assert_eq!(open(&path, DOCUMENTS, &CorpusOptions::default()).len(), 2);
}

#[test]
fn long_documents_are_truncated_at_the_configured_side() {
    let (_folder, path) = file(
        "a.jsonl",
        "{\"text\": \"0123456789\"}\n{\"text\": \"ab\"}\n{\"text\": \"<|endoftext|>\"}\n",
    );
    let open_cut = |text: &str, keep, max_length| {
        let max_length = NonZeroU32::new(max_length).unwrap();
        let cut = Some(TruncationRule { max_length, keep });
        open(&path, text, &CorpusOptions { cut, ..CorpusOptions::default() })
    };
    let ids = all_ids(&open(&path, DOCUMENTS, &CorpusOptions::default()));
    for (keep, max_length, span) in [
        (KeptEnd::Beginning, 11, (0, 11)),
        (KeptEnd::Beginning, 10, (0, 10)),
        (KeptEnd::Beginning, 2, (0, 2)),
        (KeptEnd::End, 11, (0, 11)),
        (KeptEnd::End, 10, (1, 10)),
        (KeptEnd::End, 2, (9, 2)),
    ] {
        let corpus = open_cut(DOCUMENTS, keep, max_length);
        assert_eq!((corpus.len(), corpus.span(0)), (3, span), "{keep:?} {max_length}");
        let sample = corpus.read(0).unwrap();
        assert_eq!(Length::of(&sample), corpus.length(0).unwrap());
        assert_eq!(sample.input_ids, ids[span.0 as usize..(span.0 + span.1) as usize]);
        assert_eq!((sample.labels[0], sample.num_targets() as u32), (IGNORE_INDEX, span.1 - 1));
        assert_eq!(sample.segment_lengths(), [span.1]);
        let longer = (0..2).filter(|row| corpus.whole_span(*row).1 > max_length).count();
        assert_eq!(corpus.num_truncated(), longer);
        assert_eq!(corpus.length(2).unwrap_err().reason(), "no_supervised_token");
    }
    for keep in [KeptEnd::Beginning, KeptEnd::End] {
        let corpus = open_cut(DOCUMENTS, keep, 1);
        for result in [corpus.read(0).map(drop), corpus.length(0).map(drop)] {
            let error = result.unwrap_err();
            assert_eq!((error.reason(), error.id.line), ("no_target_after_truncation", 1));
        }
        // windows are never truncated: the config rejects windows longer than `max_length`
        let windows = open_cut(r#"{"sampling": "sliding_window", "length": 5}"#, keep, 3);
        assert_eq!((windows.span(0), windows.num_truncated()), ((0, 6), 0));
    }
}

#[test]
fn cached_tokens_are_reused_unless_text_or_separators_differ() {
    let (folder, path) = file("a.jsonl", "{\"text\": \"0123456789\"}\n{\"text\": 5}\n");
    let cache = folder.path().join("cache");
    let options = CorpusOptions { cache: Some(cache.clone()), ..CorpusOptions::default() };
    let cached = || {
        let files = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<_> =
            files.map(|f| (f.file_name(), f.metadata().unwrap().modified().unwrap())).collect();
        files.sort();
        files
    };
    let first = open(&path, DOCUMENTS, &options);
    let before = cached();
    assert_eq!(before.len(), 1);
    // another `sampling` uses the same cached tokens
    let again = open(&path, r#"{"sampling": "random", "length": 3}"#, &options);
    assert_eq!(cached(), before);
    assert_eq!(first.tokens.index, again.tokens.index);
    assert_eq!(again.rejected().len(), 1, "cached rejections are reported again");
    assert_eq!(first.fingerprint(), again.fingerprint());
    let other = open(&path, r#"{"sampling": "document", "eos_token": "<|im_end|>"}"#, &options);
    assert_ne!(first.fingerprint(), other.fingerprint());
    assert_eq!(cached().len(), 2);
    File::options().append(true).open(&path).unwrap().write_all(b"{\"text\": \"1\"}\n").unwrap();
    assert_eq!(open(&path, DOCUMENTS, &options).num_documents(), 2);
    assert_eq!(cached().len(), 3);
    let without = open(&path, DOCUMENTS, &CorpusOptions::default());
    assert_eq!((without.num_documents(), cached().len()), (2, 3));
}

#[test]
fn progress_ends_at_the_total_and_cached_tokens_report_none() {
    let rows = "{\"text\": \"0123456789\"}\n".repeat(250_000);
    let text = "\u{feff}".to_owned() + &"some words of a text\n".repeat(200_000);
    for (name, text) in [("a.jsonl", rows), ("a.txt", text)] {
        let (folder, path) = file(name, &text);
        let cache = Some(folder.path().join("cache"));
        let options = CorpusOptions { cache, ..CorpusOptions::default() };
        let reported = RefCell::new(Vec::new());
        let open = || {
            let progress = |done, total| reported.borrow_mut().push((done, total));
            Corpus::open(
                std::slice::from_ref(&path),
                &config(DOCUMENTS),
                &encoder(),
                &options,
                &progress,
            )
            .unwrap();
            reported.take()
        };
        let first = open();
        assert!(first.len() > 2 && first.is_sorted(), "{name}: {first:?}");
        let total = text.len() as u64;
        assert!(first.iter().all(|(done, all)| done <= all && *all == total), "{name}");
        assert_eq!(first.last().unwrap().0, total, "{name}");
        assert!(open().is_empty(), "{name}");
    }
}

#[test]
fn rejected_texts_are_reported_with_file_and_line() {
    let rows = [
        r#"{"text": "fine"}"#,
        r#"{"text": 5}"#,
        r#"{"text": ""}"#,
        r#"{"messages": []}"#,
        "{no JSON",
        r#"{"text": "a <|image_pad|> b"}"#,
    ];
    let (_folder, path) = file("a.jsonl", &rows.join("\n"));
    let corpus = open(&path, DOCUMENTS, &CorpusOptions::default());
    let reported: Vec<_> = corpus.rejected().iter().map(|r| (r.row, r.reason.as_str())).collect();
    let expected =
        [(2, "wrong_type"), (3, "empty"), (4, "missing_key"), (5, "json"), (6, "reserved_token")];
    assert_eq!(reported, expected);
    let open = |path: &Path, text: &str, options: &CorpusOptions| {
        Corpus::open(&[path.to_owned()], &config(text), &encoder(), options, &|_, _| ())
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let stop = CorpusOptions { on_error: OnError::Stop, ..CorpusOptions::default() };
    assert!(open(&path, DOCUMENTS, &stop).contains("a.jsonl:2: `text` is a number"));
    let few = CorpusOptions { max_rejected: 0.5, ..CorpusOptions::default() };
    let error = open(&path, DOCUMENTS, &few);
    assert!(error.contains("5 of 6 rows rejected"), "{error}");

    let default = CorpusOptions::default();
    let (_folder, text) = file("a.txt", "fine\n\nnot <|video_pad|> fine\n");
    assert!(
        open(&text, DOCUMENTS, &default).contains("a.txt:1: the text contains `<|video_pad|>`")
    );
    let error = open(&text, r#"{"sampling": "document", "bos_token": "<s>"}"#, &default);
    assert!(error.contains("`corpus.bos_token`") && error.contains("`<s>`"), "{error}");
    let (_folder, short) = file("a.txt", "0123");
    let error = open(&short, r#"{"sampling": "random", "length": 3}"#, &default);
    assert!(error.contains("has 5 tokens, expected at least 6 for `length` 3"), "{error}");
    let (_folder, chats) = file("b.jsonl", r#"{"instruction": "a", "output": "b"}"#);
    assert!(open(&chats, DOCUMENTS, &default).contains("rows of the form `alpaca`"));
    let (_folder, none) = file("none.txt", "");
    assert!(open(&none, DOCUMENTS, &default).contains("has 0 tokens"));
}

#[test]
fn windows_of_an_evaluation_have_no_offset() {
    let (_folder, path) = file("a.txt", &"0123456789".repeat(4));
    let eval = CorpusOptions { purpose: Purpose::Eval, ..CorpusOptions::default() };
    for sampling in ["random", "sequential"] {
        let text = format!(r#"{{"sampling": "{sampling}", "length": 10}}"#);
        let corpus = open(&path, &text, &eval);
        assert_eq!(corpus.rows().collect::<Vec<_>>(), [0, 10, 20, 30]);
    }
    let rows = NonZeroUsize::new(2).unwrap();
    let train = CorpusOptions { purpose: Purpose::Train(rows), ..CorpusOptions::default() };
    let corpus = open(&path, r#"{"sampling": "sequential", "length": 10}"#, &train);
    assert_eq!(corpus.rows().collect::<Vec<_>>(), [0, 20, 10, 30]);
}

#[test]
fn a_row_with_a_long_text_is_tokenised_in_pieces_and_rejected_without_a_place_to_cut() {
    let whole = format!("\u{feff}{}", "Some words of 1 text.\n".repeat(60_000));
    assert!(whole.len() > text::ROW_PIECE_BYTES);
    let rows = [whole.as_str(), &"7".repeat(5 << 20), "short"];
    let rows = rows.map(|text| serde_json::json!({ "text": text }).to_string());
    let (_folder, path) = file("a.jsonl", &rows.join("\n"));
    let corpus = open(&path, DOCUMENTS, &CorpusOptions::default());
    let end = encoder().token_id("<|endoftext|>").unwrap();
    let documents: Vec<Vec<u32>> =
        ids_of(&[&whole, "short"]).into_iter().map(|ids| [ids, vec![end]].concat()).collect();
    assert_eq!(all_ids(&corpus), documents.concat());
    assert_eq!(lines(&corpus), [1, 3]);
}

/// As pieces end at spaces and newlines, the tokens have them.
#[test]
fn pieces_of_a_text_do_not_divide_added_tokens() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/quickstart/model");
    let bytes = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let mut file: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let last = file["added_tokens"].as_array().unwrap().iter().map(|token| token["id"].as_u64());
    let next = last.max().unwrap().unwrap() + 1;
    for (id, content) in (next..).zip(["hello big world", "a line\nb"]) {
        file["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    let tokenizer = serde_json::to_vec(&file).unwrap();
    let vocabulary = crate::Vocabulary { tokenizer: &tokenizer, vocab_size: next as usize + 2 };
    let (image, video) = Default::default();
    let encoder = Encoder::with_vocabulary(&folder, &image, &video, Some(vocabulary)).unwrap();
    let ids = |text: &str| encoder.encode_text(text).unwrap().ids;
    let text = "say hello big world or a line\nb and ".repeat(30);
    assert!(ids(&text).iter().filter(|id| u64::from(**id) >= next).count() == 60);
    for piece_bytes in 1..80 {
        let pieces = text::TextPieces::of(text.as_bytes(), piece_bytes, &encoder);
        let found: Vec<u32> = pieces.flat_map(|piece| ids(&piece.unwrap().text)).collect();
        assert_eq!(found, ids(&text), "pieces of {piece_bytes} bytes");
    }
}

/// Rows that are tokenised together come from several files.
#[test]
fn rows_of_several_files_keep_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a", "b", "c"]
        .iter()
        .map(|name| folder.path().join(name).with_extension("jsonl"))
        .collect();
    for (path, texts) in
        paths.iter().zip([vec!["one", "two"], vec!["three"], vec!["four", "five", "six"]])
    {
        let rows = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n");
        std::fs::write(path, rows.collect::<String>()).unwrap();
    }
    let options = CorpusOptions::default();
    let corpus =
        Corpus::open(&paths, &config(DOCUMENTS), &encoder(), &options, &|_, _| ()).unwrap();
    let end = encoder().token_id("<|endoftext|>").unwrap();
    let texts = ids_of(&["one", "two", "three", "four", "five", "six"]);
    let documents: Vec<u32> = texts.into_iter().flat_map(|ids| [ids, vec![end]].concat()).collect();
    assert_eq!(all_ids(&corpus), documents);
    assert_eq!(lines(&corpus), [1, 2, 1, 1, 2, 3]);
    let file = RowFile::open_all(&paths, None).unwrap();
    let both = |text: &str| Ok(text.to_owned());
    let together: Vec<String> =
        file.map_texts(0..6, &both).into_iter().map(Result::unwrap).collect();
    assert_eq!(together, ["one", "two", "three", "four", "five", "six"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn ids_of_the_pieces_of_a_text_equal_those_of_the_whole(
        words in prop::collection::vec(
            prop_oneof![
                r"[a-zA-Z]{1,6}", r"[0-9]{1,3}", r"[.,!?'-]{1,3}", r"'(s|t|re|ll)",
                r"[\u{e9}\u{301}\u{4e00}\u{3042}\u{1f600}]{1,3}",
                r"[ \t]{1,3}", r"(\n|\r\n|\n\n| \n|\u{a0}|\u{3000})", Just(" ".to_owned()),
            ], 1..120),
        piece_bytes in 1usize..60,
    ) {
        let text = words.concat();
        let pieces: Vec<String> = ENCODER.with(|encoder| {
            let pieces = text::TextPieces::of(text.as_bytes(), piece_bytes, encoder);
            pieces.map(|piece| piece.unwrap().text).collect()
        });
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        ENCODER.with(|encoder| {
            let ids = |text: &str| encoder.encode_text(text).unwrap().ids;
            let found: Vec<u32> = pieces.iter().flat_map(|piece| ids(piece)).collect();
            prop_assert_eq!(found, ids(&text), "{:?}", pieces);
            Ok(())
        })?;
    }
}

thread_local! {
    pub(super) static ENCODER: Encoder = encoder();
}
