use super::*;

/// Figures in "Matrix Fragments for `mma.m16n8k16` with floating point type" and "Matrix Fragments for
/// `wgmma.mma_async.m64nNk16`": the lane that has an element of a quarter of A, of
/// the sums, or of a matrix of `ldmatrix`. Even columns are in the low half, or in the register of
/// the even index.
const LANE: [[usize; 8]; 8] = [
    [0, 0, 1, 1, 2, 2, 3, 3],
    [4, 4, 5, 5, 6, 6, 7, 7],
    [8, 8, 9, 9, 10, 10, 11, 11],
    [12, 12, 13, 13, 14, 14, 15, 15],
    [16, 16, 17, 17, 18, 18, 19, 19],
    [20, 20, 21, 21, 22, 22, 23, 23],
    [24, 24, 25, 25, 26, 26, 27, 27],
    [28, 28, 29, 29, 30, 30, 31, 31],
];
/// Elements of a lane in the quarters of A, for even and odd columns: `{a0, a1}` and so on.
const OF_A: [[[usize; 2]; 2]; 2] = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]];
/// Elements of a lane in the upper and the lower half of the sums.
const OF_SUMS: [[usize; 2]; 2] = [[0, 1], [2, 3]];
/// The lane that has an element of the upper or the lower half of B, by k and column.
const LANE_OF_B: [[usize; 8]; 8] = [
    [0, 4, 8, 12, 16, 20, 24, 28],
    [0, 4, 8, 12, 16, 20, 24, 28],
    [1, 5, 9, 13, 17, 21, 25, 29],
    [1, 5, 9, 13, 17, 21, 25, 29],
    [2, 6, 10, 14, 18, 22, 26, 30],
    [2, 6, 10, 14, 18, 22, 26, 30],
    [3, 7, 11, 15, 19, 23, 27, 31],
    [3, 7, 11, 15, 19, 23, 27, 31],
];
/// Elements of a lane in the halves of B, for even and odd k.
const OF_B: [[usize; 2]; 2] = [[0, 1], [2, 3]];

const SIZES: [usize; 7] = [16, 48, 64, 80, 96, 128, 256];

struct RandomValues(u64);

impl RandomValues {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32
    }

    /// bf16 numbers from -2 to 2 of different exponents.
    fn matrix(&mut self, count: usize) -> Vec<f32> {
        let value = |random: u64| widened(0x3c00 + random % 0x400 + (random >> 20 & 1) * 0x8000);
        (0..count).map(|_| value(self.next())).collect()
    }
}

fn bits(value: f32) -> u64 {
    u64::from(value.to_bits() >> 16)
}

/// The registers of A of a warp by the figures.
fn distribute_a(a: &[f32]) -> [Lanes; 4] {
    let mut registers = [[0; LANES]; 4];
    for row in 0..16 {
        for k in 0..16 {
            let element = OF_A[row / 8][k / 8][k % 2];
            registers[element / 2][LANE[row % 8][k % 8]] |=
                bits(a[row * 16 + k]) << (element % 2 * 16);
        }
    }
    registers
}

/// The registers of B `[8, 16]` of `mma` by the figures.
fn distribute_b(b: &[f32]) -> [Lanes; 2] {
    let mut registers = [[0; LANES]; 2];
    for k in 0..16 {
        for column in 0..8 {
            let element = OF_B[k / 8][k % 2];
            registers[element / 2][LANE_OF_B[k % 8][column]] |=
                bits(b[column * 16 + k]) << (element % 2 * 16);
        }
    }
    registers
}

/// Register and lane of the sum in a row of a warp and a column, by the figures.
fn sum_at(row: usize, column: usize) -> (usize, usize) {
    (4 * (column / 8) + OF_SUMS[row / 8][column % 2], LANE[row % 8][column % 8])
}

/// The registers of sums `[16, n]` of a warp.
fn distribute_sums(sums: &[f32]) -> Vec<Lanes> {
    let n = sums.len() / 16;
    let mut registers = vec![[0; LANES]; n / 2];
    for (index, sum) in sums.iter().enumerate() {
        let (register, lane) = sum_at(index / n, index % n);
        registers[register][lane] = u64::from(sum.to_bits());
    }
    registers
}

/// The sums of `a` `[rows, 16]`, `b` `[n, 16]` and `c` `[rows, n]`, `together` products at a time, in
/// integers.
fn reference(a: &[f32], b: &[f32], c: &[f32], together: usize) -> Vec<f32> {
    let n = b.len() / 16;
    let sum = |index: usize| {
        let (a, b) = (&a[index / n * 16..][..16], &b[index % n * 16..][..16]);
        let products: Vec<f64> =
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).collect();
        products.chunks(together).fold(c[index], |sum, products| {
            let terms: Vec<f64> = products.iter().copied().chain([f64::from(sum)]).collect();
            let largest = terms.iter().fold(0f64, |most, term| most.max(term.abs()));
            if largest == 0.0 {
                return 0.0;
            }
            let unit = 2f64.powi(largest.log2().floor() as i32 - 24);
            let mut total: i64 = terms.iter().map(|term| (term / unit) as i64).sum();
            let mut scale = unit;
            while total.abs() >= 1 << 24 {
                (total, scale) = (total / 2, scale * 2.0);
            }
            (total as f64 * scale) as f32
        })
    };
    (0..c.len()).map(sum).collect()
}

fn execute_mma(a: &[f32], b: &[f32], c: &[f32]) -> Vec<Lanes> {
    let c = distribute_sums(c).try_into().expect("four registers");
    mma(&distribute_a(a), &distribute_b(b), &c).to_vec()
}

#[test]
fn elements_are_in_the_lanes_of_the_document() {
    assert_eq!(place_in_a(0, 5, 0), (1, 2), "a0 of lane 5");
    assert_eq!(place_in_a(1, 5, 1), (9, 3), "a3 of lane 5");
    assert_eq!(place_in_a(2, 30, 0), (7, 12), "a4 of lane 30");
    assert_eq!(place_in_a(3, 31, 1), (15, 15), "a7 of lane 31");
    assert_eq!(place_in_b(0, 5, 1), (1, 3), "b1 of lane 5");
    assert_eq!(place_in_b(1, 31, 0), (7, 14), "b2 of lane 31");
    assert_eq!(place_in_sums(1, 5), (1, 3), "c1 of lane 5");
    assert_eq!(place_in_sums(2, 31), (15, 6), "c2 of lane 31");
    assert_eq!(place_in_sums(127, 31), (15, 255), "the last sum of wgmma");
    // Each element is in one place.
    let mut seen = [0; 256];
    for (register, lane) in (0..4).flat_map(|r| (0..LANES).map(move |lane| (r, lane))) {
        for half in 0..2 {
            let (row, k) = place_in_a(register, lane, half);
            seen[row * 16 + k] += 1;
        }
    }
    assert_eq!(seen, [1; 256]);
}

#[test]
fn mma_multiplies() {
    let mut random = RandomValues(1);
    let mut identity = vec![0.0; 256];
    for i in 0..16 {
        identity[i * 17] = 1.0;
    }
    let (b, zeros) = (random.matrix(8 * 16), [0.0; 128]);
    let transposed: Vec<f32> = (0..128).map(|i| b[i % 8 * 16 + i / 8]).collect();
    assert_eq!(execute_mma(&identity, &b, &zeros), distribute_sums(&transposed));
    for _ in 0..20 {
        let (a, b, c) = (random.matrix(256), random.matrix(128), random.matrix(128));
        assert_eq!(execute_mma(&a, &b, &c), distribute_sums(&reference(&a, &b, &c, 8)));
    }
}

#[test]
fn sums_are_truncated() {
    const LARGE: f32 = 16_777_216.0; // the next f32 is larger by 2
    let sum = |c: f32, products: &[f32]| {
        let (mut a, mut b, mut sums) = ([0.0; 256], [0.0; 128], [0.0; 128]);
        b[..16].fill(1.0);
        a[..products.len()].copy_from_slice(products);
        sums[0] = c;
        f32::from_bits(execute_mma(&a, &b, &sums)[0][0] as u32)
    };
    assert_eq!(sum(LARGE, &[1.0, 1.0]), LARGE + 2.0, "one bit more than an f32 has");
    assert_eq!(sum(LARGE, &[1.5]), LARGE, "to nearest, it would be larger");
    assert_eq!(sum(-LARGE, &[-1.5]), -LARGE, "toward zero");
    assert_eq!(sum(LARGE, &[0.5; 8]), LARGE, "each product is truncated");
    assert_eq!(sum(LARGE, &[-0.5; 8]), LARGE, "negative ones too");
    assert_eq!(sum(LARGE, &[1.0, 0., 0., 0., 0., 0., 0., 0., 1.0]), LARGE, "eight at a time");
    assert_eq!(sum(1.0, &[-1.0, 1e-9]), 0.0, "the largest cancels, but the unit is its own");
}

#[test]
fn infinities_and_nan_spread() {
    let (mut a, mut b, mut c) = ([1.0; 256], [1.0; 128], [0.0; 128]);
    a[0] = f32::INFINITY;
    b[16] = 0.0; // k 0 of column 1
    b[2 * 16] = -1.0;
    c[3] = f32::NEG_INFINITY;
    c[8 + 4] = -f32::NAN;
    c[8 + 5] = f32::NEG_INFINITY;
    a[2 * 16] = 3e38;
    c[2 * 8] = 3e38;
    let d = execute_mma(&a, &b, &c);
    let at = |row: usize, column: usize| {
        let (register, lane) = sum_at(row, column);
        d[register][lane]
    };
    assert_eq!(at(0, 0), u64::from(f32::INFINITY.to_bits()));
    assert_eq!(at(0, 1), NAN, "infinity times zero");
    assert_eq!(at(0, 2), u64::from(f32::NEG_INFINITY.to_bits()));
    assert_eq!(at(0, 3), NAN, "infinity minus infinity");
    assert_eq!(at(1, 4), NAN, "the sign and payload of a NaN are lost");
    assert_eq!(at(1, 5), u64::from(f32::NEG_INFINITY.to_bits()));
    assert_eq!(at(2, 0), u64::from(f32::INFINITY.to_bits()), "overflow");
    assert_eq!(at(1, 0), u64::from(16f32.to_bits()));
}

#[test]
fn wgmma_multiplies() {
    let mut random = RandomValues(2);
    for n in SIZES.into_iter().chain([8]) {
        let (a, b) = (random.matrix(64 * 16), random.matrix(n * 16));
        let c = random.matrix(64 * n);
        let warps = |sums: &[f32]| sums.chunks(16 * n).map(distribute_sums).collect::<Vec<_>>();
        let mut d = warps(&c);
        wgmma(&a, &b, &mut d, true);
        assert_eq!(d, warps(&reference(&a, &b, &c, 16)), "{n}");

        let mut d = vec![vec![[NAN; LANES]; n / 2]; 4];
        wgmma(&a, &b, &mut d, false);
        assert_eq!(d, warps(&reference(&a, &b, &vec![0.0; 64 * n], 16)), "{n} from zero");
    }
}

#[test]
fn a_of_wgmma_comes_from_registers() {
    let a = RandomValues(3).matrix(64 * 16);
    let registers: Vec<_> = a.chunks(256).map(distribute_a).collect();
    assert_eq!(a_from_registers(&registers), a);
}

#[test]
fn ldmatrix_gives_rows_to_lanes() {
    let addresses: Lanes = std::array::from_fn(|lane| 1000 + 16 * lane as u64);
    for count in [1, 2, 4] {
        let rows = matrix_rows(&addresses, count);
        assert_eq!(rows.len(), 8 * count);
        assert_eq!(rows[8 * count - 1], addresses[8 * count - 1]);
        // Element (row, column) of matrix i is 100 i + 10 row + column.
        let bytes: Vec<[u8; 16]> = (0..8 * count)
            .map(|row| {
                std::array::from_fn(|byte| {
                    let element = 100 * (row / 8) + 10 * (row % 8) + byte / 2;
                    (element as u16).to_le_bytes()[byte % 2]
                })
            })
            .collect();
        for transposed in [false, true] {
            let registers = distribute(&bytes, transposed);
            assert_eq!(registers.len(), count);
            for (i, row, column) in (0..count * 64).map(|x| (x / 64, x / 8 % 8, x % 8)) {
                let pair = registers[i][LANE[row][column]];
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                let half = if transposed { row % 2 } else { column % 2 };
                let element = 100 * i + 10 * row + column;
                assert_eq!(pair >> (16 * half) & 0xffff, element as u64, "{transposed}");
            }
        }
    }
    let row = [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0];
    assert_eq!(distribute(&[row; 8], false)[0][5], 4 << 16 | 3);
    assert_eq!(distribute(&[row; 8], true)[0][5], 2 << 16 | 2);
}

/// A descriptor, as kernels make them (`matrix_at` in hopper.cuh).
fn descriptor(start: u64, leading: u64, stride: u64, swizzle: Swizzle) -> u64 {
    let mode = match swizzle {
        Swizzle::None => 0,
        Swizzle::Bytes128 => 1,
        Swizzle::Bytes64 => 2,
        Swizzle::Bytes32 => 3,
    };
    start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
}

#[test]
fn descriptors_are_taken_apart() {
    let bits = descriptor(0x3_8400, 0x4000, 1024, Swizzle::Bytes128);
    let (start, leading, stride) = (0x3_8400, 0x4000, 1024);
    let swizzle = Swizzle::Bytes128;
    assert_eq!(Descriptor::decode(bits), Ok(Descriptor { start, leading, stride, swizzle }));
    for bit in [14, 15, 30, 31, 46, 47, 48, 52, 57, 61] {
        let bits = bits | 1 << bit;
        assert_eq!(Descriptor::decode(bits), Err(DescriptorError::OtherBits(bits)), "{bit}");
    }
    for bit in [49, 50, 51] {
        let bits = bits | 1 << bit;
        assert_eq!(Descriptor::decode(bits), Err(DescriptorError::BaseOffset(bits)), "{bit}");
    }
}

#[test]
fn tiles_begin_where_their_pattern_does() {
    let addresses = |start: u64, swizzle: Swizzle, rows: usize, transposed: bool| {
        let bits = descriptor(start, 4096, 8 * swizzle.width(), swizzle);
        Descriptor::decode(bits).and_then(|at| at.addresses(rows, transposed))
    };
    let pattern = |start, width| Err(DescriptorError::Pattern { start, width });
    let end = |start, bytes, width| Err(DescriptorError::EndOfRow { start, bytes, width });
    assert!(addresses(1024 + 96, Swizzle::Bytes128, 64, false).is_ok());
    assert_eq!(addresses(128, Swizzle::Bytes128, 64, false), pattern(128, 128));
    assert_eq!(addresses(512 + 32, Swizzle::Bytes128, 64, false), pattern(544, 128));
    assert_eq!(addresses(256, Swizzle::Bytes64, 64, false), pattern(256, 64));
    assert!(addresses(256, Swizzle::Bytes32, 64, false).is_ok());
    assert_eq!(addresses(64, Swizzle::Bytes32, 64, false), pattern(64, 32));
    assert_eq!(addresses(1024 + 112, Swizzle::Bytes128, 64, false), end(1136, 32, 128));
    assert_eq!(addresses(1024 + 32, Swizzle::Bytes128, 128, true), end(1056, 128, 128));
    assert!(addresses(1024 + 32, Swizzle::Bytes128, 48, true).is_ok());
    assert!(addresses(16, Swizzle::None, 64, false).is_ok());

    // Groups of eight rows need not follow each other.
    let bits = descriptor(1024 + 32, 16, 3072, Swizzle::Bytes128);
    let at = Descriptor::decode(bits).and_then(|at| at.addresses(24, false)).expect("a tile");
    assert_eq!(at[..2], [1024 + 32, 1024 + 48]);
    assert_eq!(at[2 * 8], 1024 + 3072 + 32);
    assert_eq!(at[2 * 17 + 1], 1024 + 2 * 3072 + 128 + 2 * 16, "column 3 of row 1");
}

#[test]
fn permutations_are_by_address() {
    assert_eq!(Swizzle::Bytes128.permuted(0x3d5), 0x3a5);
    assert_eq!(Swizzle::Bytes128.permuted(0x7f0), 0x780);
    assert_eq!(Swizzle::Bytes64.permuted(0x1f0), 0x1c0);
    assert_eq!(Swizzle::Bytes32.permuted(0x1f0), 0x1e0);
    assert_eq!(Swizzle::None.permuted(0x1f0), 0x1f0);
}

/// Global memory from an address on, and shared memory from address 0 on.
struct TestMemory {
    base: u64,
    global: Vec<u8>,
    shared: Vec<u8>,
}

impl TestMemory {
    fn new(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| (bits(*value) as u16).to_le_bytes());
        Self { base: 0x7000_0000, global: bytes.collect(), shared: vec![0xee; 1 << 18] }
    }

    /// Copies a box; each byte must be written once.
    fn copy(&mut self, map: &TensorMap, to: u64, at: [i32; 3]) {
        let mut written = 0;
        for piece in map.pieces(to, at).expect("a destination") {
            let place = &mut self.shared[piece.to as usize..][..16];
            assert!(place.iter().all(|byte| *byte == 0xee), "written twice");
            place.fill(0);
            if !piece.inside.is_empty() {
                let from = (piece.from - self.base) as usize;
                let length = piece.inside.len();
                place[piece.inside].copy_from_slice(&self.global[from..][..length]);
            }
            assert!((to..to + map.box_bytes()).contains(&piece.to));
            written += 16;
        }
        assert_eq!(written, map.box_bytes());
    }

    /// The matrix that a descriptor means.
    fn matrix(&self, bits: u64, rows: usize, transposed: bool) -> Vec<f32> {
        let at = Descriptor::decode(bits).and_then(|at| at.addresses(rows, transposed));
        let piece = |at: u64| self.shared[at as usize..][..16].try_into().expect("16 bytes");
        matrix(&at.expect("a descriptor").into_iter().map(piece).collect::<Vec<_>>(), transposed)
    }
}

fn find_swizzle(width: u64) -> Swizzle {
    match width {
        32 => Swizzle::Bytes32,
        64 => Swizzle::Bytes64,
        _ => Swizzle::Bytes128,
    }
}

/// The map of a tensor `[rows, heads, columns]`, for boxes of rows of a head.
fn build_map(
    memory: &TestMemory,
    [rows, heads, columns]: [u64; 3],
    width: u64,
    box_rows: u64,
) -> TensorMap {
    let map = TensorMap {
        address: memory.base,
        sizes: [columns, heads, rows],
        strides: [2 * columns, 2 * columns * heads],
        box_sizes: [width / 2, 1, box_rows],
        swizzle: find_swizzle(width),
    };
    assert_eq!(TensorMap::from_bytes(&map.to_bytes()), Ok(map));
    map
}

#[test]
fn copied_boxes_are_read_by_descriptors() {
    let mut random = RandomValues(4);
    for (n, width) in SIZES.into_iter().flat_map(|n| [32, 64, 128].map(|width| (n, width))) {
        // Head 1 of 3, from row 5 on; the last rows of the boxes are outside of the tensor.
        let (heads, columns, rows, first) = (3, 64, n + 2, 5);
        let values = random.matrix(rows * heads * columns);
        let mut memory = TestMemory::new(&values);
        let sizes = [rows, heads, columns].map(|size| size as u64);
        let map = build_map(&memory, sizes, width as u64, n as u64);
        let (start, panel) = (3072, width * n);
        for index in 0..columns * 2 / width {
            let at = [(index * width / 2) as i32, 1, first as i32];
            memory.copy(&map, (start + index * panel) as u64, at);
        }
        for k in 0..columns / 16 {
            let at = start + 32 * k / width * panel + 32 * k % width;
            let bits = descriptor(at as u64, 16, 8 * width as u64, find_swizzle(width as u64));
            let expected: Vec<f32> = (0..n * 16)
                .map(|i| {
                    let row = first + i / 16;
                    let at = (row * heads + 1) * columns + 16 * k + i % 16;
                    if row < rows { values[at] } else { 0.0 }
                })
                .collect();
            assert_eq!(memory.matrix(bits, n, false), expected, "{n} rows of {width}, step {k}");
            // The 64 rows of A: a warp has 16 of them.
            assert_eq!(memory.matrix(bits, 16, false), expected[..256]);
        }
    }
}

#[test]
fn transposed_boxes_are_read_by_descriptors() {
    let mut random = RandomValues(5);
    for (n, width) in SIZES.into_iter().flat_map(|n| [32, 64, 128].map(|width| (n, width))) {
        let (rows, box_rows) = (70, 64);
        let values = random.matrix(rows * n);
        let mut memory = TestMemory::new(&values);
        let map = build_map(&memory, [rows, 1, n].map(|size| size as u64), width as u64, 64);
        let (start, panel) = (1024, width * box_rows);
        for index in 0..(2 * n).div_ceil(width) {
            // Columns from `n` on are zeros, and no product reads them.
            let at = [(index * width / 2) as i32, 0, 3];
            memory.copy(&map, (start + index * panel) as u64, at);
        }
        for k in 0..box_rows / 16 {
            let at = start + 16 * k * width;
            let swizzle = find_swizzle(width as u64);
            let bits = descriptor(at as u64, panel as u64, 8 * width as u64, swizzle);
            let expected: Vec<f32> =
                (0..n * 16).map(|i| values[(3 + 16 * k + i % 16) * n + i / 16]).collect();
            assert_eq!(memory.matrix(bits, n, true), expected, "{n} columns of {width}, step {k}");
        }
    }
}

#[test]
fn core_matrices_without_permutation() {
    let mut random = RandomValues(6);
    for n in [16, 64, 96] {
        let values = random.matrix(n * 16);
        // A core matrix has eight lines of 16 bytes. Those of the first eight k lie before the others,
        // or those of each eight rows lie together.
        for (leading, stride) in [(16 * n, 128), (128, 256)] {
            let mut memory = TestMemory::new(&[]);
            for transposed in [false, true] {
                for (i, value) in values.iter().enumerate() {
                    let (row, k) = (i / 16, i % 16);
                    let core = k / 8 * leading + row / 8 * stride;
                    let (line, element) = if transposed { (k, row) } else { (row, k) };
                    let at = 4112 + core + line % 8 * 16 + element % 8 * 2;
                    memory.shared[at..at + 2].copy_from_slice(&(bits(*value) as u16).to_le_bytes());
                }
                let bits = descriptor(4112, leading as u64, stride as u64, Swizzle::None);
                assert_eq!(memory.matrix(bits, n, transposed), values, "{n} {transposed}");
            }
        }
    }
}

#[test]
fn elements_outside_of_a_tensor_are_zeros() {
    let (rows, heads, columns) = (6, 2, 24);
    let values = RandomValues(7).matrix(rows * heads * columns);
    let memory = TestMemory::new(&values);
    // Only 21 of the columns belong to the tensor.
    let map = TensorMap {
        address: memory.base,
        sizes: [21, 2, 6],
        strides: [48, 96],
        box_sizes: [16, 2, 4],
        swizzle: Swizzle::Bytes32,
    };
    for at in
        [[0, 0, 0], [-3, 0, -2], [16, 1, 4], [11, -1, 5], [21, 0, 0], [0, 0, -4], [i32::MIN; 3]]
    {
        let mut memory = TestMemory { global: memory.global.clone(), ..TestMemory::new(&[]) };
        memory.copy(&map, 128, at);
        for (x, y, z) in (0..128).map(|i| (i % 16, i / 16 % 2, i / 32)) {
            let to = Swizzle::Bytes32.permuted(128 + (x + 16 * y + 32 * z) * 2) as usize;
            let [column, head, row] =
                [(at[0], x), (at[1], y), (at[2], z)].map(|(at, i)| i64::from(at) + i as i64);
            let is_inside =
                (0..21).contains(&column) && (0..2).contains(&head) && (0..6).contains(&row);
            let expected =
                if is_inside { bits(values[((row * 2 + head) * 24 + column) as usize]) } else { 0 };
            let found = u16::from_le_bytes([memory.shared[to], memory.shared[to + 1]]);
            assert_eq!(u64::from(found), expected, "{at:?} {x} {y} {z}");
        }
    }
}

#[test]
fn wrong_tensor_maps_are_errors() {
    let map = build_map(&TestMemory::new(&[]), [100, 3, 64], 128, 64);
    assert_eq!(map.box_bytes(), 64 * 128);
    assert_eq!(map.pieces(64, [0; 3]).err(), Some(TensorMapError::Destination(64)));
    let of = |map: TensorMap| TensorMap::from_bytes(&map.to_bytes());
    let unaligned =
        [TensorMap { address: map.address + 8, ..map }, TensorMap { strides: [128, 392], ..map }];
    assert!(unaligned.iter().all(|map| of(*map) == Err(TensorMapError::Alignment)));
    let sizes = [
        TensorMap { sizes: [64, 0, 100], ..map },
        TensorMap { sizes: [64, 3, (1 << 32) + 1], ..map },
        TensorMap { strides: [128, 1 << 41], ..map },
        TensorMap { sizes: [64, 3, 1 << 32], strides: [128, 1 << 40], ..map },
    ];
    assert!(sizes.iter().all(|map| of(*map) == Err(TensorMapError::Sizes)));
    for box_sizes in [[64, 1, 0], [64, 257, 1]] {
        assert_eq!(of(TensorMap { box_sizes, ..map }), Err(TensorMapError::Box));
    }
    for columns in [8, 32, 72] {
        let (bytes, width) = (2 * columns, 128);
        let wrong = TensorMap { box_sizes: [columns, 1, 64], ..map };
        assert_eq!(of(wrong), Err(TensorMapError::Row { bytes, width }));
    }
    let plain = TensorMap { swizzle: Swizzle::None, box_sizes: [24, 1, 64], ..map };
    assert_eq!(of(plain), Ok(plain));

    let with = |word: usize, value: u64| {
        let mut bytes = map.to_bytes();
        bytes[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
        TensorMap::from_bytes(&bytes)
    };
    assert_eq!(with(0, 1), Err(TensorMapError::NoMap));
    assert_eq!(with(15, 1), Err(TensorMapError::NoMap));
    assert_eq!(with(10, 48), Err(TensorMapError::Swizzle(48)));
    assert_eq!(with(11, 4), Err(TensorMapError::Elements(4)));
}

#[test]
fn maps_are_those_of_the_stand_in() {
    let map = build_map(&TestMemory::new(&[]), [100, 3, 64], 128, 48);
    let words: [u64; 16] =
        [0x7E4509A9, 0x7000_0000, 64, 3, 100, 128, 384, 64, 1, 48, 128, 2, 0, 0, 0, 0];
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    assert_eq!(map.to_bytes().to_vec(), bytes);
}
