//! Windows of the frames of a micro-batch: squares of merged tokens, cut off at the right and at
//! the bottom of a frame.

/// The windows of all frames, frame by frame and row by row.
pub(super) struct Windows {
    /// The merged tokens in the order of the windows: their places in the order of the tokens,
    /// `[M]`.
    pub(super) order: Vec<u32>,
    pub(super) lengths: Vec<u32>,
}

impl Windows {
    /// `grids` has patches per axis, `merge` the patches and `window` the merged tokens on a side.
    pub(super) fn new(grids: &[[u32; 3]], merge: usize, window: usize) -> Self {
        let (mut order, mut lengths) = (Vec::new(), Vec::new());
        let mut first = 0; // token of the frame
        let frames = grids.iter().flat_map(|[t, h, w]| std::iter::repeat_n([h, w], *t as usize));
        for frame in frames {
            let [height, width] = frame.map(|patches| *patches as usize / merge);
            for top in (0..height).step_by(window) {
                for left in (0..width).step_by(window) {
                    let (rows, columns) =
                        (top..height.min(top + window), left..width.min(left + window));
                    lengths.push((rows.len() * columns.len() * merge * merge) as u32);
                    for row in rows {
                        order.extend(
                            columns.clone().map(|column| (first + row * width + column) as u32),
                        );
                    }
                }
            }
            first += height * width;
        }
        Self { order, lengths }
    }

    /// The place of each token in the order of the windows.
    pub(super) fn places(&self) -> Vec<u32> {
        let mut places = vec![0; self.order.len()];
        for (place, token) in self.order.iter().enumerate() {
            places[*token as usize] = place as u32;
        }
        places
    }

    /// The values of the tokens, `width` each, in the order of the windows.
    pub(super) fn arranged(&self, values: &[f32], width: usize) -> Vec<f32> {
        let token = |at: &u32| &values[*at as usize * width..(*at as usize + 1) * width];
        self.order.iter().flat_map(token).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_cut_off_at_the_edges_of_a_frame_and_do_not_join_frames() {
        // two frames of 3 x 5 tokens, and an image of 2 x 1
        let windows = Windows::new(&[[2, 6, 10], [1, 4, 2]], 2, 2);
        let frame = [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14];
        let second = frame.map(|token| token + 15);
        assert_eq!(windows.order, [&frame[..], &second, &[30, 31]].concat());
        let lengths = [4, 4, 2, 2, 2, 1].map(|tokens| tokens * 4);
        assert_eq!(windows.lengths, [&lengths[..], &lengths, &[8]].concat());
    }

    #[test]
    fn the_places_undo_the_order() {
        let windows = Windows::new(&[[1, 10, 18], [2, 2, 2]], 2, 4);
        let values: Vec<f32> = (0..94).map(|i| i as f32).collect();
        let arranged = windows.arranged(&values, 2);
        let back = Windows { order: windows.places(), lengths: vec![] };
        assert_eq!(back.arranged(&arranged, 2), values);
        assert_ne!(arranged, values);
    }
}
