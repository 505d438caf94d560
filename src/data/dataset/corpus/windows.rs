//! Next-token windows of a token stream: where each begins, as a function of an offset.
//!
//! A window of length `T` is `T + 1` tokens: `T` inputs, and `T` targets one token later. Windows
//! that follow each other without overlap share one token, the last target of one and the first
//! input of the next, so that each token is a target once.

/// Where the windows of a pass over a corpus begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    tokens: u32,
    length: u32,
    spacing: Spacing,
}

/// How windows follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spacing {
    /// One every so many tokens, from the first token on.
    Stride(u32),
    /// End to end, from an offset on that each pass draws.
    Tiled,
    /// From an offset on, cut into so many tracks of equal length, and end to end in each; a batch
    /// has the next window of every track.
    Tracks(u32),
}

impl Windows {
    /// Windows over `tokens` tokens; fails with the fewest tokens that would do when these give no
    /// window at the least lucky offset. `length`, stride and tracks are above 0.
    pub fn new(tokens: u32, length: u32, spacing: Spacing) -> Result<Self, u64> {
        let length_u64 = u64::from(length);
        let fewest = match spacing {
            Spacing::Stride(_) => length_u64 + 1,
            Spacing::Tiled => 2 * length_u64,
            Spacing::Tracks(tracks) => (u64::from(tracks) + 1) * length_u64,
        };
        let windows = Self { tokens, length, spacing };
        if u64::from(tokens) < fewest { Err(fewest) } else { Ok(windows) }
    }

    /// `T`: inputs of a window.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Tokens of the corpus.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Offsets that a pass draws from: `0..num_offsets()`.
    pub fn num_offsets(&self) -> u32 {
        match self.spacing {
            Spacing::Stride(_) => 1,
            Spacing::Tiled | Spacing::Tracks(_) => self.length,
        }
    }

    /// Whether the order of the windows is part of what they are: it must not be shuffled.
    pub fn are_ordered(&self) -> bool {
        matches!(self.spacing, Spacing::Tracks(_))
    }

    /// Windows of a pass: with `n` tokens from `offset` on, `(n - 1) / T` end to end, and as many
    /// for each track of `(n - 1) / tracks` tokens. At least one.
    pub fn count(&self, offset: u32) -> u32 {
        let targets = self.tokens - offset - 1;
        match self.spacing {
            Spacing::Stride(stride) => (targets - self.length) / stride + 1,
            Spacing::Tiled => targets / self.length,
            Spacing::Tracks(tracks) => targets / tracks / self.length * tracks,
        }
    }

    /// Fewest windows that a pass can have.
    pub fn fewest(&self) -> u32 {
        self.count(self.num_offsets() - 1)
    }

    /// First token of each window of a pass, in the order of the pass; `count(offset)` of them.
    pub fn starts(&self, offset: u32) -> impl Iterator<Item = u32> + use<> {
        let Self { tokens, length, spacing } = *self;
        (0..self.count(offset)).map(move |window| match spacing {
            Spacing::Stride(stride) => window * stride,
            Spacing::Tiled => offset + window * length,
            Spacing::Tracks(tracks) => {
                let track_tokens = (tokens - offset - 1) / tracks;
                offset + window % tracks * track_tokens + window / tracks * length
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn windows(tokens: u32, length: u32, spacing: Spacing) -> Windows {
        Windows::new(tokens, length, spacing).unwrap()
    }

    fn starts(spacing: Spacing, offset: u32) -> Vec<u32> {
        windows(35, 5, spacing).starts(offset).collect()
    }

    /// The worked example of docs/corpora.md: 35 tokens, windows of 5, batches of 2.
    #[test]
    fn thirty_five_tokens_in_windows_of_five() {
        assert_eq!(starts(Spacing::Stride(1), 0), (0..30).collect::<Vec<_>>());
        assert_eq!(starts(Spacing::Stride(4), 0), [0, 4, 8, 12, 16, 20, 24, 28]);
        assert_eq!(starts(Spacing::Stride(5), 0), [0, 5, 10, 15, 20, 25]);
        for offset in 0..5 {
            let expected = [0, 5, 10, 15, 20, 25].map(|start| start + offset);
            assert_eq!(starts(Spacing::Tiled, offset), expected);
        }
        // two tracks of 17 tokens from token 0, of 16 from token 2, of 15 from token 4
        assert_eq!(starts(Spacing::Tracks(2), 0), [0, 17, 5, 22, 10, 27]);
        assert_eq!(starts(Spacing::Tracks(2), 2), [2, 18, 7, 23, 12, 28]);
        assert_eq!(starts(Spacing::Tracks(2), 4), [4, 19, 9, 24, 14, 29]);
    }

    #[test]
    fn a_corpus_without_a_window_at_every_offset_is_refused_with_the_fewest_tokens() {
        for (spacing, fewest) in
            [(Spacing::Stride(3), 6), (Spacing::Tiled, 10), (Spacing::Tracks(2), 15)]
        {
            assert_eq!(Windows::new(fewest as u32 - 1, 5, spacing), Err(fewest));
            let windows = windows(fewest as u32, 5, spacing);
            assert!(windows.fewest() >= 1, "{spacing:?}");
        }
        assert!(Windows::new(u32::MAX, u32::MAX - 1, Spacing::Tiled).is_err());
    }

    proptest! {
        #[test]
        fn windows_lie_inside_and_tile_what_they_should(
            tokens in 2u32..400, length in 1u32..40, step in 1u32..50, kind in 0usize..3
        ) {
            let spacing =
                [Spacing::Stride(step), Spacing::Tiled, Spacing::Tracks(step % 5 + 1)][kind];
            let Ok(windows) = Windows::new(tokens, length, spacing) else { return Ok(()) };
            for offset in 0..windows.num_offsets() {
                let starts: Vec<u32> = windows.starts(offset).collect();
                prop_assert_eq!(starts.len() as u32, windows.count(offset));
                prop_assert!(starts.len() as u32 >= windows.fewest() && !starts.is_empty());
                let mut targets = vec![0; tokens as usize];
                for start in &starts {
                    let last = start + length; // the last target
                    prop_assert!(*start >= offset && last < tokens);
                    targets[*start as usize + 1..=last as usize].iter_mut().for_each(|n| *n += 1);
                }
                let twice = targets.iter().any(|times| *times > 1);
                match spacing {
                    Spacing::Stride(stride) => {
                        prop_assert_eq!(twice, stride < length && starts.len() > 1);
                        // another one would not fit
                        prop_assert!(starts.last().unwrap() + stride + length >= tokens);
                    }
                    Spacing::Tiled => {
                        prop_assert!(!twice);
                        // all but the offset, the first token and a rest shorter than a window
                        let left = targets[offset as usize + 1..].iter().filter(|n| **n == 0).count();
                        prop_assert!(left < length as usize);
                    }
                    Spacing::Tracks(tracks) => {
                        prop_assert!(!twice);
                        for batch in starts.chunks(tracks as usize) {
                            prop_assert_eq!(batch.len(), tracks as usize);
                        }
                        // a row of the next batch goes on where that of this one ends
                        for (now, next) in starts.iter().zip(&starts[tracks as usize..]) {
                            prop_assert_eq!(now + length, *next);
                        }
                    }
                }
            }
        }
    }
}
