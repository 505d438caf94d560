//! The order of the patches of a frame, which the vision encoder and the image processor share.

/// Row and column of each patch of a frame of `[h, w]` patches, in merge-block order: token by token,
/// in a token square by square, in a square row by row. `merge` and `square` are the patches on a side
/// of a token and of a square; a model that merges patches in one step has one square in a token.
pub fn merge_block_order(
    [h, w]: [u32; 2],
    merge: u32,
    square: u32,
) -> impl Iterator<Item = (u32, u32)> {
    let squares = merge / square; // on a side of a token
    let in_token = move |i: u32| {
        let (of_square, inside) = (i / square.pow(2), i % square.pow(2));
        (
            of_square / squares * square + inside / square,
            of_square % squares * square + inside % square,
        )
    };
    let tokens = (0..h)
        .step_by(merge as usize)
        .flat_map(move |top| (0..w).step_by(merge as usize).map(move |left| (top, left)));
    tokens.flat_map(move |(top, left)| {
        (0..merge * merge).map(in_token).map(move |(row, column)| (top + row, left + column))
    })
}
