//! Small kernels, right and wrong: what the machine computes, and which faults it finds.

use ptx::{Access, Failure, Fault, Global, Launch, run};

/// A kernel with the parameters `a`, `b` (addresses) and `n`, and 1,024 bytes of shared memory.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n\
         .shared .align 16 .b8 tile[1024];\n\
         .visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1,\n.param .u32 k_param_2\n)\n{{\n\
         .reg .pred %p<8>;\n.reg .b32 %r<32>;\n.reg .f32 %f<16>;\n.reg .b64 %rd<16>;\n\
         ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nld.param.u32 %r1, [k_param_2];\n\
         mov.u32 %r2, %tid.x;\nmul.wide.u32 %rd3, %r2, 4;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n\
         mov.u32 %r3, tile;\nshl.b32 %r4, %r2, 2;\nadd.s32 %r4, %r3, %r4;\n\
         {body}\nret;\n}}\n"
    )
}

struct Run {
    b: Vec<u32>,
    result: Result<ptx::Counts, Box<Failure>>,
}

/// Runs a kernel with `a[i] = 100 + i` and an unwritten `b`, both of 256 words.
fn execute(body: &str, blocks: u32, threads: usize, seed: u64) -> Run {
    let module = ptx::parse(&kernel(body)).expect("right PTX");
    let mut global = Global::default();
    let a: Vec<u8> = (0..256u32).flat_map(|i| (100 + i).to_le_bytes()).collect();
    let (a, b) = (global.upload(&a), global.allocate(1024));
    let mut params = [a.to_le_bytes(), b.to_le_bytes()].concat();
    params.extend(7u32.to_le_bytes());
    let launch = Launch {
        kernel: &module.kernels[0],
        grid: [blocks, 1, 1],
        threads,
        shared_bytes: 0,
        params: &params,
        registers: 32,
        seed,
    };
    let result = run(&launch, &mut global);
    let bytes = global.download(b).expect("an allocation").0;
    let b =
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect();
    Run { b, result }
}

/// Fails unless the kernel is right for each of many orders.
fn right(body: &str, threads: usize) -> Vec<u32> {
    let first = execute(body, 1, threads, 1);
    first.result.unwrap_or_else(|failure| panic!("{failure}"));
    for seed in 2..20 {
        let other = execute(body, 1, threads, seed);
        other.result.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(other.b, first.b, "seed {seed}");
    }
    first.b
}

/// Fails unless a kernel has a fault of this kind in each of many orders.
fn wrong(body: &str, threads: usize, is_expected: impl Fn(&Fault) -> bool) {
    for seed in 1..20 {
        let Err(failure) = execute(body, 1, threads, seed).result else {
            panic!("seed {seed}: no fault")
        };
        assert!(is_expected(&failure.fault), "seed {seed}: {failure}");
    }
}

/// A read of shared memory that no order puts after its write.
fn is_early(fault: &Fault) -> bool {
    matches!(fault, Fault::Race { .. } | Fault::Unwritten { .. })
}

/// Thread i writes word i of shared memory, and reads that of thread i + 32 (modulo the block).
const EXCHANGE: &str = "st.shared.u32 [%r4], %r2;\nBARRIER\nadd.s32 %r5, %r2, 32;\nand.b32 %r5, %r5, 63;\n\
    shl.b32 %r5, %r5, 2;\nadd.s32 %r5, %r3, %r5;\nld.shared.u32 %r6, [%r5];\nst.global.u32 [%rd5], %r6;";

#[test]
fn a_barrier_orders_accesses_of_shared_memory() {
    let b = right(&EXCHANGE.replace("BARRIER", "bar.sync 0;"), 64);
    assert_eq!((b[0], b[33], b[63]), (32, 1, 31));
    wrong(&EXCHANGE.replace("BARRIER", ""), 64, is_early);
    // a barrier of a warp does not order two warps
    wrong(&EXCHANGE.replace("BARRIER", "bar.warp.sync -1;"), 64, is_early);
}

#[test]
fn lanes_of_a_warp_need_a_barrier_of_the_warp() {
    let reverse = "st.shared.u32 [%r4], %r2;\nBARRIER\nxor.b32 %r5, %r2, 31;\nshl.b32 %r5, %r5, 2;\n\
        add.s32 %r5, %r3, %r5;\nld.shared.u32 %r6, [%r5];\nst.global.u32 [%rd5], %r6;";
    assert_eq!(right(&reverse.replace("BARRIER", "bar.warp.sync -1;"), 32)[1], 30);
    let is_of_31 = |fault: &Fault| matches!(fault, Fault::Race { access: Access::Read, by, .. } if by == "thread 31");
    wrong(&reverse.replace("BARRIER", ""), 32, is_of_31);
}

#[test]
fn addresses_are_in_an_allocation_aligned_and_written() {
    let load = |at: &str| format!("ld.global.u32 %r6, [{at}];\nst.global.u32 [%rd5], %r6;");
    assert_eq!(right(&load("%rd4"), 32)[5], 105);
    let is_outside = |fault: &Fault| matches!(fault, Fault::OutOfBounds { bytes: 4, .. });
    wrong(&load("%rd4+1020"), 32, is_outside);
    wrong("ld.shared.u32 %r6, [%r4+1024];", 32, is_outside);
    wrong(&load("%rd4+2"), 32, |fault| matches!(fault, Fault::Misaligned { bytes: 4, .. }));
    let vector = "ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd4];";
    wrong(vector, 32, |fault| matches!(fault, Fault::Misaligned { bytes: 16, .. }));
    wrong(&load("%rd5"), 32, |fault| matches!(fault, Fault::Unwritten { .. }));
    wrong("ld.shared.u32 %r6, [%r4];", 32, |fault| matches!(fault, Fault::Unwritten { .. }));
}

#[test]
fn blocks_do_not_share_bytes_that_one_of_them_writes() {
    let of = |body: &str| execute(body, 2, 32, 1).result;
    of("ld.global.u32 %r6, [%rd4];").unwrap();
    let both = of("st.global.u32 [%rd5], %r2;").unwrap_err();
    assert!(matches!(both.fault, Fault::BlockRace { other: Access::Write, .. }), "{both}");
    assert_eq!((both.block, both.thread), ([1, 0, 0], 0));
    let read = "mov.u32 %r5, %ctaid.x;\nsetp.eq.s32 %p1, %r5, 0;\n@%p1 ld.global.u32 %r6, [%rd4];\n\
        @%p1 bra $L__BB0_1;\nst.global.u32 [%rd4], %r2;\n$L__BB0_1:";
    let fault = of(read).unwrap_err().fault;
    assert!(matches!(fault, Fault::BlockRace { other: Access::Read, .. }), "{fault}");
}

#[test]
fn divergent_threads_meet_again() {
    // odd threads take another way; then all take part in a shuffle
    let body = "and.b32 %r5, %r2, 1;\nsetp.eq.s32 %p1, %r5, 0;\nmov.u32 %r6, 10;\n@%p1 bra $L__BB0_1;\n\
        mov.u32 %r6, 20;\n$L__BB0_1:\nshfl.sync.bfly.b32 %r7|%p2, %r6, 1, 31, -1;\nst.global.u32 [%rd5], %r7;";
    let b = right(body, 32);
    assert_eq!((b[0], b[1]), (20, 10));
    // a loop whose threads leave it at different times
    let body = "mov.u32 %r5, 0;\n$L__BB0_1:\nadd.s32 %r5, %r5, 1;\nsetp.le.s32 %p1, %r5, %r2;\n\
        @%p1 bra $L__BB0_1;\nbar.warp.sync -1;\nst.global.u32 [%rd5], %r5;";
    assert_eq!(right(body, 64)[..3], [1, 2, 3]);
}

#[test]
fn instructions_of_a_warp_need_all_of_its_threads() {
    let half = "setp.lt.s32 %p1, %r2, 16;\n@%p1 bra $L__BB0_1;\nINSTRUCTION\n$L__BB0_1:";
    for instruction in [
        "shfl.sync.idx.b32 %r7|%p2, %r2, 0, 31, -1;",
        "bar.warp.sync -1;",
        "bar.sync 0;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6,%r7,%r8,%r9}, [%r3];",
    ] {
        let is_half = |fault: &Fault| {
            matches!(fault, Fault::NotAllLanes { reached: 0xffff_0000, needed: u32::MAX })
        };
        wrong(&half.replace("INSTRUCTION", instruction), 32, is_half);
    }
    // named threads only
    let body = half.replace(
        "INSTRUCTION",
        "shfl.sync.idx.b32 %r7|%p2, %r2, 20, 31, 0xffff0000;\nst.global.u32 [%rd5], %r7;",
    );
    assert_eq!(right(&body, 32)[31], 20);
}

#[test]
fn a_barrier_that_not_all_warps_reach_hangs() {
    let body = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\nbar.sync 1, COUNT;\n$L__BB0_1:";
    right(&body.replace("COUNT", "32"), 64);
    let hangs = |fault: &Fault| matches!(fault, Fault::Hang { .. });
    wrong(&body.replace("COUNT", "64"), 64, hangs);
    let body = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\nbar.sync 1, 64;\nbra $L__BB0_2;\n\
        $L__BB0_1:\nbar.sync 1, 32;\n$L__BB0_2:";
    // the warp of 32 may come first and go on alone
    wrong(body, 64, |fault| hangs(fault) || matches!(fault, Fault::BarrierCount { .. }));
}

#[test]
fn asynchronous_copies_are_waited_for() {
    let copy = "mul.wide.u32 %rd6, %r2, 16;\nadd.s64 %rd6, %rd1, %rd6;\nshl.b32 %r5, %r2, 4;\nadd.s32 %r5, %r3, %r5;\n\
        cp.async.cg.shared.global [%r5], [%rd6], 16, SIZE;\ncp.async.commit_group;\nWAIT\n\
        ld.shared.u32 %r6, [%r5+4];\nst.global.u32 [%rd5], %r6;";
    let with = |size: &str, wait: &str| copy.replace("SIZE", size).replace("WAIT", wait);
    let mov = "mov.u32 %r7, 4;\n";
    assert_eq!(right(&with("16", "cp.async.wait_group 0;"), 32)[2], 109);
    assert_eq!(right(&format!("{mov}{}", with("%r7", "cp.async.wait_group 0;")), 32)[2], 0);
    for wait in ["", "cp.async.wait_group 1;"] {
        wrong(&with("16", wait), 32, |fault| matches!(fault, Fault::InFlight { .. }));
    }
    let ends = copy.replace("SIZE", "16").split("WAIT").next().unwrap().to_owned();
    wrong(&ends, 32, |fault| matches!(fault, Fault::EndInFlight { what: "copies" }));
}

/// Thread 0 of a block of two warps initialises a barrier; the second warp waits for the first one.
const MBARRIER: &str = "mov.u32 %r9, tile;\nadd.s32 %r9, %r9, 512;\nsetp.ne.s32 %p1, %r2, 0;\n@%p1 bra $L__BB0_1;\n\
    mov.u32 %r8, COUNT;\nmbarrier.init.shared::cta.b64 [%r9], %r8;\n$L__BB0_1:\nSYNC\n\
    setp.ge.s32 %p2, %r2, 32;\n@%p2 bra $L__BB0_3;\nst.shared.u32 [%r4], %r2;\nARRIVE\nbra $L__BB0_4;\n\
    $L__BB0_3:\nmov.u32 %r10, 0;\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], %r10;\n\
    ld.shared.u32 %r6, [%r4+-128];\nst.global.u32 [%rd5], %r6;\n$L__BB0_4:";

#[test]
fn barriers_in_shared_memory_order_and_count() {
    let with = |count: &str, sync: &str, arrive: &str| {
        MBARRIER.replace("COUNT", count).replace("SYNC", sync).replace("ARRIVE", arrive)
    };
    let arrive = "mbarrier.arrive.shared::cta.b64 _, [%r9];";
    assert_eq!(right(&with("32", "bar.sync 0;", arrive), 64)[35], 3);
    // one thread arrives for its warp: only after a barrier of the warp
    let first = "setp.ne.s32 %p4, %r2, 0;\n@%p4 bra $L__BB0_2;\nmbarrier.arrive.shared::cta.b64 _, [%r9];\n$L__BB0_2:";
    assert_eq!(right(&with("1", "bar.sync 0;", &format!("bar.warp.sync -1;\n{first}")), 64)[35], 3);
    wrong(&with("1", "bar.sync 0;", first), 64, |fault| matches!(fault, Fault::Race { .. }));
    let hangs = |fault: &Fault| matches!(fault, Fault::Hang { .. });
    // two phases end, and the other warp waits for the one after them; or none ends
    for count in ["16", "33"] {
        wrong(&with(count, "bar.sync 0;", arrive), 64, hangs);
    }
    // without a barrier of the block, the other warp may not see that it is initialised
    wrong(&with("32", "", arrive), 64, |fault| {
        is_early(fault) || matches!(fault, Fault::NoMemoryBarrier { .. })
    });
}

#[test]
fn integer_division_by_zero_names_its_place() {
    let body = "sub.s32 %r5, %r2, 3;\ndiv.s32 %r6, %r1, %r5;";
    let failure = execute(body, 1, 32, 1).result.unwrap_err();
    assert!(matches!(failure.fault, Fault::Scalar(_)), "{failure}");
    let text = failure.to_string();
    assert!(text.starts_with("k, PTX line ") && text.contains("zero"), "{text}");
}

#[test]
fn shuffles_stay_in_their_segments() {
    let shuffle = |mode: &str, b: &str, c: &str| {
        format!(
            "shfl.sync.{mode}.b32 %r7|%p2, %r2, {b}, {c}, -1;\nselp.u32 %r8, 1000, 0, %p2;\nadd.s32 %r7, %r7, %r8;\nst.global.u32 [%rd5], %r7;"
        )
    };
    // segments of 8 lanes: mask 24, clamp 31
    let c = (24 << 8 | 31).to_string();
    assert_eq!(right(&shuffle("idx", "3", &c), 32)[17], 1019);
    assert_eq!(right(&shuffle("bfly", "16", "31"), 32)[5], 1021);
    assert_eq!(right(&shuffle("bfly", "16", &c), 32)[5], 5, "out of its segment: its own value");
}
