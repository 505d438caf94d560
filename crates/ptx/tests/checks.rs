//! Small kernels, right and wrong: what the machine computes, and which faults it finds.

#[path = "checks/tickets.rs"]
mod tickets;

use ptx::instruction::Space;
use ptx::products::{Swizzle, TensorMap};
use ptx::{Access, Failure, Fault, Global, Launch, run};

/// A kernel with the parameters `a`, `b` (addresses), `n` and a tensor map, and 1,024 bytes of shared
/// memory.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n\
         .shared .align 16 .b8 tile[1024];\n\
         .visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1,\n.param .u32 k_param_2,\n.param .align 64 .b8 k_param_3[128]\n)\n{{\n\
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
    execute_text(&kernel(body), &|launch| Launch { grid: [blocks, 1, 1], threads, seed, ..launch })
}

/// Runs the kernel of a text; `change` sets what differs from one block of a warp.
fn execute_text(text: &str, change: &dyn Fn(Launch<'_>) -> Launch<'_>) -> Run {
    let module = ptx::parse(text).expect("right PTX");
    let mut global = Global::default();
    let a: Vec<u8> = (0..256u32).flat_map(|i| (100 + i).to_le_bytes()).collect();
    let (a, b) = (global.upload(&a), global.allocate(1024));
    let mut params = [a.to_le_bytes(), b.to_le_bytes()].concat();
    params.extend(7u32.to_le_bytes());
    params.resize(64, 0);
    // 8 rows of 128 bytes of `a`, and boxes of two rows
    let map = TensorMap {
        address: a,
        sizes: [64, 8, 1],
        strides: [128, 1024],
        box_sizes: [64, 2, 1],
        swizzle: Swizzle::None,
    };
    params.extend(map.to_bytes());
    let launch = Launch {
        kernel: &module.kernels[0],
        grid: [1; 3],
        threads: 32,
        shared_bytes: 0,
        max_shared_bytes: 232_448,
        max_instructions: 1 << 20,
        params: &params,
        registers: 32,
        seed: 1,
    };
    let result = run(&change(launch), &mut global);
    let bytes = global.download(b).expect("an allocation").0;
    let b =
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect();
    Run { b, result }
}

/// Runs a kernel, and returns the results with its counts. Which instructions of a loop of polls a
/// warp has executed depends on the order.
fn counted(body: &str, threads: usize, seed: u64) -> (Vec<u32>, ptx::Counts) {
    let Run { b, result } = execute(body, 1, threads, seed);
    let counts = result.unwrap_or_else(|failure| panic!("{failure}"));
    (b, ptx::Counts { executed: Vec::new(), ..counts })
}

/// Fails unless the kernel is right, and has the same counts, for each of many orders.
fn right(body: &str, threads: usize) -> Vec<u32> {
    let first = counted(body, threads, 1);
    for seed in 2..20 {
        assert_eq!(counted(body, threads, seed), first, "seed {seed}");
    }
    first.0
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

#[test]
fn counts_are_those_of_the_hardware() {
    const SETUP: u64 = 10;
    let of = |body: &str, threads| counted(body, threads, 1).1;
    // five of the instructions before each body are loads of parameters and copies of registers
    let body = "ld.global.u32 %r5, [%rd4];\nld.global.u32 %r6, [%rd4];\nst.global.u32 [%rd4], %r5;\n\
        ld.global.u32 %r6, [%rd4];\nst.global.u32 [%rd5], %r6;\ncvt.rn.f32.u32 %f1, %r6;\nsqrt.rn.f32 %f2, %f1;";
    let counts = of(body, 64);
    assert_eq!((counts.instructions, counts.moves), (2 * (SETUP + 7 + 1), 2 * 5));
    assert_eq!(counts.special, 2);
    assert_eq!((counts.global_read, counts.global_written), (64 * 12, 64 * 8));
    // what the launch has written itself, and what it reads again, need no access to memory
    assert_eq!((counts.memory_read, counts.memory_written), (64 * 4, 64 * 8));
    // a row of 128 bytes twice, then one word for all lanes
    let body = "st.shared.u32 [%r4], %r2;\nbar.warp.sync -1;\n\
        ld.shared.u32 %r6, [%r4];\nld.shared.u32 %r6, [%r3];";
    let counts = of(body, 32);
    assert_eq!((counts.shared_read, counts.shared_written), (256, 128));
    assert_eq!((counts.shared_busy, counts.barriers), (3 * 128, 1));
    // four warps read the 8 x 16 elements of B together
    let body = PRODUCT.replace("FENCE", FENCE).replace("BEFORE", "").replace("ISSUED", "");
    let counts = of(&body, 128);
    assert_eq!((counts.shared_read, counts.products), (8 * 16 * 2, 64 * 8 * 16));
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
        "bar.warp.sync -1;",
        "bar.sync 0;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6,%r7,%r8,%r9}, [%r3];",
    ] {
        let is_half = |fault: &Fault| {
            matches!(fault, Fault::NotAllLanes { reached: 0xffff_0000, needed: u32::MAX })
        };
        wrong(&half.replace("INSTRUCTION", instruction), 32, is_half);
    }
    // `shfl.sync` waits for the threads of its mask that have not ended; another one may not be read
    let shuffle = |from: u32, mask: &str| {
        let instruction = format!(
            "shfl.sync.idx.b32 %r7|%p2, %r2, {from}, 31, {mask};\nst.global.u32 [%rd5], %r7;"
        );
        half.replace("INSTRUCTION", &instruction)
    };
    assert_eq!(right(&shuffle(20, "0xffff0000"), 32)[31], 20);
    assert_eq!(right(&shuffle(20, "-1"), 32)[31], 20);
    wrong(&shuffle(0, "-1"), 32, |fault| matches!(fault, Fault::AbsentLane { lane: 0 }));
    // a thread that is not in its mask
    wrong(&shuffle(20, "0x7fff0000"), 32, |fault| {
        matches!(fault, Fault::NotAllLanes { reached: 0xffff_0000, needed: 0x7fff_0000 })
    });
}

#[test]
fn a_barrier_that_not_all_warps_reach_hangs() {
    let body = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\nbar.sync 1, COUNT;\n$L__BB0_1:";
    right(&body.replace("COUNT", "32"), 64);
    // `bar`: barriers 0 to 15, a count that is a multiple of 32, and one arrival of each warp
    right("bar.sync 15;", 64);
    wrong("bar.sync 16;", 64, |fault| matches!(fault, Fault::BarrierId { id: 16, .. }));
    let is_count = |fault: &Fault| matches!(fault, Fault::BarrierCount { .. });
    wrong("bar.sync 1, 48;", 64, is_count);
    wrong("bar.arrive 1, 0;", 64, is_count);
    wrong("bar.arrive 1, 96;\nbar.arrive 1, 96;", 32, |fault| {
        matches!(fault, Fault::ArrivesAgain { id: 1, warp: 0 })
    });
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
    let more = format!("mov.u32 %r7, 17;\n{}", with("%r7", "cp.async.wait_group 0;"));
    wrong(&more, 32, |fault| matches!(fault, Fault::CopySize { size: 17, most: 16 }));
    // a group may be empty, and copies that nothing orders write different bytes
    let empty = "cp.async.commit_group;\ncp.async.wait_group 1;";
    assert_eq!(right(&with("16", empty), 32)[2], 109);
    let twice = copy.replace("SIZE;", "16;\ncp.async.cg.shared.global [%r5], [%rd6], 16;");
    wrong(&twice.replace("WAIT", "cp.async.wait_group 0;"), 32, |fault| {
        matches!(fault, Fault::InFlight { .. })
    });
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
    $L__BB0_3:\nmov.u32 %r10, PARITY;\n$L__BB0_5:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], %r10;\n\
    @!%p3 bra $L__BB0_5;\n\
    ld.shared.u32 %r6, [%r4+-128];\nst.global.u32 [%rd5], %r6;\n$L__BB0_4:";

#[test]
fn barriers_in_shared_memory_order_and_count() {
    let with = |count: &str, sync: &str, arrive: &str| {
        let parity = MBARRIER.replace("PARITY", "0");
        parity.replace("COUNT", count).replace("SYNC", sync).replace("ARRIVE", arrive)
    };
    let arrive = "mbarrier.arrive.shared::cta.b64 _, [%r9];";
    assert_eq!(right(&with("32", "bar.sync 0;", arrive), 64)[35], 3);
    // one thread arrives for its warp: only after a barrier of the warp
    let first = "setp.ne.s32 %p4, %r2, 0;\n@%p4 bra $L__BB0_2;\nmbarrier.arrive.shared::cta.b64 _, [%r9];\n$L__BB0_2:";
    assert_eq!(right(&with("1", "bar.sync 0;", &format!("bar.warp.sync -1;\n{first}")), 64)[35], 3);
    wrong(&with("1", "bar.sync 0;", first), 64, |fault| matches!(fault, Fault::Race { .. }));
    let hangs = |fault: &Fault| matches!(fault, Fault::Hang { .. });
    wrong(&with("33", "bar.sync 0;", arrive), 64, hangs);
    // "Phase of the mbarrier object": a thread waits for a phase before arrivals of the next one
    wrong(&with("16", "bar.sync 0;", arrive), 64, |fault| {
        matches!(fault, Fault::NotWaitedFor { at: 512 })
    });
    // an arrival releases earlier accesses only
    let store = "st.shared.u32 [%r4], %r2;";
    let late = with("32", "bar.sync 0;", &format!("{arrive}\n{store}"));
    wrong(&late.replacen(store, "", 1), 64, is_early);
    // `mbarrier.try_wait`: it may return false, and the parity is 0 or 1
    let once = with("32", "bar.sync 0;", arrive).replace("@!%p3 bra $L__BB0_5;\n", "");
    let is_wrong = |seed| matches!(execute(&once, 1, 64, seed).result, Err(failure) if is_early(&failure.fault));
    assert!((1..200).any(is_wrong));
    let parity = MBARRIER.replace("PARITY", "2").replace("COUNT", "32");
    wrong(&parity.replace("SYNC", "bar.sync 0;").replace("ARRIVE", arrive), 64, |fault| {
        matches!(fault, Fault::Parity { parity: 2 })
    });
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
    // PTX ISA, `shfl.sync`: b and c have 5 bits; c is the last lane (the first one for `up`)
    let check = |mode, b, c: u32, expected: &[(usize, u32)]| {
        let found = right(&shuffle(mode, b, &c.to_string()), 32);
        for (lane, value) in expected {
            assert_eq!(found[*lane], *value, "{mode} {b} {c}, lane {lane}");
        }
    };
    check("up", "1", 0, &[(0, 0), (1, 1000), (31, 1030)]);
    check("up", "3", 24 << 8, &[(7, 1004), (8, 8), (10, 10), (11, 1008)]);
    check("down", "1", 31, &[(0, 1001), (30, 1031), (31, 31)]);
    check("down", "2", 24 << 8 | 31, &[(5, 1007), (6, 6), (7, 7), (8, 1010)]);
    check("down", "1", 15, &[(14, 1015), (15, 15), (20, 20)]);
    check("idx", "20", 15, &[(3, 3), (20, 20)]);
    check("idx", "33", 31, &[(0, 1001), (31, 1001)]);
}

#[test]
fn barriers_in_shared_memory_are_no_ordinary_memory() {
    let init = |count: u32| {
        format!("mov.u32 %r8, {count};\n@!%p1 mbarrier.init.shared::cta.b64 [%r3], %r8;\n")
    };
    let with = |body: &str| format!("setp.ne.s32 %p1, %r2, 0;\n{body}\nbar.sync 0;");
    // "Contents of the mbarrier object": 1 to 2^20 - 1 arrivals
    right(&with(&init(1)), 32);
    right(&with(&init((1 << 20) - 1)), 32);
    for count in [0, 1 << 20] {
        wrong(&with(&init(count)), 32, |fault| matches!(fault, Fault::ArrivalCount { .. }));
    }
    let again = init(1).repeat(2);
    wrong(&with(&again), 32, |fault| matches!(fault, Fault::InitialisedAgain { at: 0 }));
    let misaligned = init(1).replace("[%r3]", "[%r3+4]");
    wrong(&with(&misaligned), 32, |fault| matches!(fault, Fault::Misaligned { bytes: 8, .. }));
    for access in ["ld.shared.u32 %r6, [%r3+4];", "st.shared.u32 [%r3], %r2;"] {
        let body = with(&format!("{}@!%p1 {access}", init(1)));
        wrong(&body, 32, |fault| matches!(fault, Fault::OrdinaryAccess { at: 0 | 4 }));
    }
}

/// Thread 0 copies a box to shared memory; then all threads read a word.
const BOX: &str = "add.s32 %r9, %r3, 512;\nsetp.ne.s32 %p1, %r2, 0;\nmov.u32 %r8, 1;\nmov.u32 %r11, 0;\nBEFORE\n\
    @%p1 bra $L__BB0_1;\nmbarrier.init.shared::cta.b64 [%r9], %r8;\nfence.mbarrier_init.release.cluster;\n$L__BB0_1:\n\
    bar.sync 0;\n@%p1 bra $L__BB0_2;\nmov.b64 %rd6, k_param_3;\ncvta.param.u64 %rd6, %rd6;\nmov.u32 %r10, 256;\n\
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], %r10;\nEXPECTED\n\
    cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd6, {%r11, %r8, %r11}], [%r9];\n\
    $L__BB0_2:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], %r11;\n@!%p3 bra $L__BB0_2;\n\
    ld.shared.u32 %r6, [WORD];\nst.global.u32 [%rd5], %r6;";

#[test]
fn copies_of_boxes_are_in_the_asynchronous_proxy() {
    let with = |before: &str, expected: &str, word: &str| {
        BOX.replace("BEFORE", before).replace("EXPECTED", expected).replace("WORD", word)
    };
    // the second row of `a`
    let b = right(&with("", "", "%r4"), 64);
    assert_eq!((b[0], b[63]), (132, 195));
    // what threads have written must be fenced, and a fence of barriers is another one
    let is_unfenced = |fault: &Fault| matches!(fault, Fault::NoProxyFence { at: 0 });
    let store = "st.shared.u32 [%r4], %r2;";
    wrong(&with(store, "", "%r4"), 64, is_unfenced);
    let fence = format!("{store}\nfence.proxy.async.shared::cta;");
    assert_eq!(right(&with(&fence, "", "%r4"), 64)[1], 133);
    let other = format!("{store}\nfence.mbarrier_init.release.cluster;");
    wrong(&with(&other, "", "%r4"), 64, is_unfenced);
    // "Asynchronous Operations": the end of a copy does not order earlier accesses of its thread
    wrong(&with("", "st.shared.u32 [%r9+64], %r2;", "%r9+64"), 64, is_early);
    // a block that ends before its copy does
    let wait = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], %r11;\n@!%p3 bra $L__BB0_2;\n\
                ld.shared.u32 %r6, [%r4];\n";
    let copied = with("", "", "%r4");
    assert!(copied.contains(wait));
    wrong(&copied.replace(wait, "mov.u32 %r6, 0;\n"), 64, |fault| {
        matches!(fault, Fault::EndInFlight { what: "copies of boxes" })
    });
}

/// Sums of 16 products of 1 and 1, A from registers and B with eight columns.
const PRODUCT: &str = "mov.u32 %r10, 0x3f803f80;\nmov.u32 %r11, %r10;\nmov.u32 %r12, %r10;\nmov.u32 %r13, %r10;\n\
    st.shared.u32 [%r4], %r10;\nFENCE\nbar.sync 0;\nmov.b64 %rd6, 0x1000080000;\nBEFORE\nwgmma.fence.sync.aligned;\n\
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, {%r10,%r11,%r12,%r13}, %rd6, 0, 1, 1, 0;\nISSUED\n\
    wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nst.global.f32 [%rd5], %f0;\n$L__BB0_1:";
const FENCE: &str = "fence.proxy.async.shared::cta;";

#[test]
fn products_of_a_warpgroup_need_fences_and_all_warps() {
    let with = |fence: &str, before: &str, issued: &str| {
        PRODUCT.replace("FENCE", fence).replace("BEFORE", before).replace("ISSUED", issued)
    };
    assert_eq!(right(&with(FENCE, "", ""), 128)[..128], [16f32.to_bits(); 128]);
    let is_unfenced = |fault: &Fault| matches!(fault, Fault::NoProxyFence { .. });
    wrong(&with("", "", ""), 128, is_unfenced);
    wrong(&with("fence.mbarrier_init.release.cluster;", "", ""), 128, is_unfenced);
    // `wgmma.wait_group`: no access to the sums and to A before, not even a read
    for register in ["%f2", "%r12"] {
        let read = format!("mov.b32 %r14, {register};");
        wrong(
            &with(FENCE, "", &read),
            128,
            |fault| matches!(fault, Fault::BusyRegister { register: busy } if busy == register),
        );
    }
    // `wgmma.fence`: between products of other shapes with the same sums
    let product = |n: u32, sums: &str| {
        format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {sums}, {{%r10,%r11,%r12,%r13}}, %rd6, 1, 1, 1, 0;"
        )
    };
    let same = product(8, "{%f0,%f1,%f2,%f3}");
    assert_eq!(right(&with(FENCE, "", &same), 128)[0], 32f32.to_bits());
    let other = product(16, "{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}");
    let fenced = format!("wgmma.fence.sync.aligned;\n{other}");
    assert_eq!(right(&with(FENCE, "", &fenced), 128)[0], 32f32.to_bits());
    wrong(
        &with(
            FENCE,
            "mov.f32 %f4, 0f00000000;\nmov.f32 %f5, %f4;\nmov.f32 %f6, %f4;\nmov.f32 %f7, %f4;",
            &other,
        ),
        128,
        |fault| matches!(fault, Fault::NoProductFence { register } if register == "%f0"),
    );
    // `.aligned`: all warps, with the same descriptors
    let is_alone = |fault: &Fault| matches!(fault, Fault::NotAligned);
    let one = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;";
    wrong(&with(FENCE, one, ""), 128, is_alone);
    wrong(&with(FENCE, "", ""), 64, is_alone);
    let own = "shr.u32 %r14, %r2, 7;\nadd.s32 %r14, %r14, 1;\nsetp.lt.s32 %p1, %r2, 32;\n@%p1 mov.b64 %rd6, 0x800080000;";
    wrong(&with(FENCE, own, ""), 128, is_alone);
}

#[test]
fn warps_exchange_the_registers_of_their_block() {
    // 32 registers at the start; no warp ends before all have other ones
    let set = |change: &str, number: u32| {
        format!("setmaxnreg.{change}.sync.aligned.u32 {number};\nbar.sync 1, 256;")
    };
    let groups = |low: &str, high: &str| {
        format!(
            "setp.ge.s32 %p1, %r2, 128;\n@%p1 bra $L__BB0_1;\n{low}\nbra $L__BB0_2;\n$L__BB0_1:\n{high}\n$L__BB0_2:"
        )
    };
    right(&groups(&set("dec", 24), &set("inc", 40)), 256);
    let hangs = |fault: &Fault| matches!(fault, Fault::Hang { .. });
    wrong(&groups(&set("dec", 24), &set("inc", 48)), 256, hangs);
    let is_wrong = |fault: &Fault| matches!(fault, Fault::Registers { before: 32, .. });
    wrong(&set("dec", 40), 256, is_wrong);
    wrong(&set("inc", 24), 256, is_wrong);
    // all warps of a warpgroup
    let three = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\n\
        setmaxnreg.dec.sync.aligned.u32 24;\n$L__BB0_1:";
    wrong(three, 128, |fault| matches!(fault, Fault::NotAligned));
}

#[test]
fn arrivals_do_not_order_the_accesses_of_their_warp() {
    let reverse = "st.shared.u32 [%r4], %r2;\nBARRIER\nxor.b32 %r5, %r2, 31;\nshl.b32 %r5, %r5, 2;\n\
        add.s32 %r5, %r3, %r5;\nld.shared.u32 %r6, [%r5];\nst.global.u32 [%rd5], %r6;";
    right(&reverse.replace("BARRIER", "bar.sync 1, 32;"), 32);
    wrong(&reverse.replace("BARRIER", "bar.arrive 1, 32;"), 32, is_early);
    // the warp that waits sees the accesses before the arrival
    let body = "setp.ge.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\nFIRST\nbra $L__BB0_2;\n$L__BB0_1:\n\
        bar.sync 1, 64;\nld.shared.u32 %r6, [%r4+-128];\nst.global.u32 [%rd5], %r6;\n$L__BB0_2:";
    let (store, arrive) = ("st.shared.u32 [%r4], %r2;", "bar.arrive 1, 64;");
    assert_eq!(right(&body.replace("FIRST", &format!("{store}\n{arrive}")), 64)[35], 3);
    wrong(&body.replace("FIRST", &format!("{arrive}\n{store}")), 64, is_early);
}

#[test]
fn uniform_branches_parameters_and_sizes_of_blocks() {
    let uniform = "setp.lt.s32 %p1, %r2, 32;\n@%p1 bra.uni $L__BB0_1;\nmov.u32 %r5, 0;\n$L__BB0_1:";
    right(uniform, 64);
    wrong(&uniform.replace("%r2, 32", "%r2, 16"), 64, |fault| matches!(fault, Fault::NotUniform));
    wrong("ld.param.u32 %r6, [k_param_0+2];", 32, |fault| {
        matches!(fault, Fault::Misaligned { space: Space::Param, at: 2, bytes: 4 })
    });
    right("", 1024);
    for threads in [0, 33, 1056] {
        wrong("", threads, |fault| matches!(fault, Fault::NumThreads { most: 1024, .. }));
    }
    let launch = |change: &dyn Fn(Launch<'_>) -> Launch<'_>| {
        execute_text(&kernel("mov.u32 %r5, tile;"), change).result.unwrap_err().fault
    };
    for grid in
        [[1 << 17, 1 << 15, 1], [1, 0, 1], [1, 1 << 16, 1], [1, 1, 1 << 16], [1 << 31, 1, 1]]
    {
        assert_eq!(launch(&|launch| Launch { grid, ..launch }), Fault::Grid { grid });
    }
    let large = launch(&|launch| Launch { shared_bytes: 232_448 - 1023, ..launch });
    assert_eq!(large, Fault::TooMuchShared { bytes: 232_449, most: 232_448 });
    let huge = launch(&|launch| Launch { shared_bytes: usize::MAX, ..launch });
    assert!(matches!(huge, Fault::TooMuchShared { .. }), "{huge}");
}

/// Thread i writes word i of `b`, and reads that of another thread.
const GLOBAL_EXCHANGE: &str = "st.global.u32 [%rd5], %r2;\nBARRIER\nxor.b32 %r5, %r2, OTHER;\nmul.wide.u32 %rd6, %r5, 4;\n\
    add.s64 %rd6, %rd2, %rd6;\nld.global.u32 %r6, [%rd6];";

fn is_global_race(fault: &Fault) -> bool {
    matches!(fault, Fault::Race { space: Space::Global, .. })
}

#[test]
fn barriers_order_accesses_of_global_memory() {
    let with = |barrier: &str, other: &str| {
        GLOBAL_EXCHANGE.replace("BARRIER", barrier).replace("OTHER", other)
    };
    right(&with("", "0"), 64);
    right(&with("bar.warp.sync -1;", "31"), 64);
    wrong(
        &with("", "31"),
        32,
        |fault| matches!(fault, Fault::Race { space: Space::Global, access: Access::Read, by, .. } if by == "thread 31"),
    );
    right(&with("bar.sync 0;", "32"), 64);
    let is_early =
        |fault: &Fault| is_global_race(fault) || matches!(fault, Fault::Unwritten { .. });
    wrong(&with("", "32"), 64, is_early);
    wrong(&with("bar.warp.sync -1;", "32"), 64, is_early);
    // a write after reads: all of them must be ordered before
    let read = "ld.global.u32 %r6, [%rd4];\nld.global.u32 %r7, [%rd1];\nBARRIER\nsetp.ne.s32 %p1, %r2, 5;\n\
        @%p1 bra $L__BB0_1;\nst.global.u32 [%rd1], %r2;\n$L__BB0_1:";
    right(&read.replace("BARRIER", "bar.sync 0;"), 64);
    for barrier in ["", "bar.warp.sync -1;"] {
        wrong(&read.replace("BARRIER", barrier), 64, is_global_race);
    }
    // stores of 16 bytes, read as words and as a copy to shared memory
    let vector = "mul.wide.u32 %rd6, %r2, 16;\nadd.s64 %rd6, %rd2, %rd6;\nst.global.v4.u32 [%rd6], {%r2,%r2,%r2,%r2};\n\
        BARRIER\nREAD";
    let copy = "mov.b64 %rd7, %rd2;\nshl.b32 %r5, %r2, 4;\nadd.s32 %r5, %r3, %r5;\n\
        cp.async.cg.shared.global [%r5], [%rd7], 16;\ncp.async.commit_group;\ncp.async.wait_group 0;";
    for read in ["ld.global.u32 %r6, [%rd5];", copy] {
        let body = vector.replace("READ", read);
        right(&body.replace("BARRIER", "bar.warp.sync -1;"), 32);
        wrong(&body.replace("BARRIER", ""), 32, is_global_race);
    }
}

#[test]
fn sources_of_copies_are_unchanged_until_the_wait() {
    // the first warp copies what the second one overwrites
    let body = "setp.ge.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_1;\ncp.async.cg.shared.global [%r3], [%rd1], 16;\n\
        cp.async.commit_group;\nEARLY\ncp.async.wait_group 0;\nLATE\nbra $L__BB0_2;\n$L__BB0_1:\nbar.sync 0;\n\
        setp.ne.s32 %p1, %r2, 32;\n@%p1 bra $L__BB0_2;\nst.global.u32 [%rd1], %r2;\n$L__BB0_2:";
    let body = body.replace("cp.async.cg", "setp.ne.s32 %p2, %r2, 0;\n@!%p2 cp.async.cg");
    let with = |early: &str, late: &str| body.replace("EARLY", early).replace("LATE", late);
    right(&with("", "bar.sync 0;"), 64);
    wrong(&with("bar.sync 0;", ""), 64, is_global_race);
}

#[test]
fn a_block_may_not_write_what_warps_of_another_one_read() {
    let body = "ld.global.u32 %r6, [%rd1];\nbar.sync 0;\nmov.u32 %r5, %ctaid.x;\nadd.s32 %r5, %r5, %r2;\n\
        setp.ne.s32 %p1, %r5, NUMBER;\n@%p1 bra $L__BB0_1;\nst.global.u32 [%rd1], %r2;\n$L__BB0_1:";
    execute(&body.replace("NUMBER", "100"), 3, 64, 1).result.unwrap();
    let failure = execute(&body.replace("NUMBER", "65"), 3, 64, 1).result.unwrap_err();
    assert_eq!(failure.block, [2, 0, 0]);
    assert!(matches!(failure.fault, Fault::BlockRace { other: Access::Read, .. }), "{failure}");
}

#[test]
fn unused_bytes_of_global_loads_may_be_unwritten() {
    let body = "mul.wide.u32 %rd6, %r2, 16;\nadd.s64 %rd6, %rd2, %rd6;\nst.global.u32 [%rd6+4], %r2;\n\
        .pragma \"used_bytes_mask MASK\";\nld.global.v4.u32 {%r6,%r7,%r8,%r9}, [%rd6];";
    right(&body.replace("MASK", "240"), 32);
    wrong(&body.replace("MASK", "496"), 32, |fault| matches!(fault, Fault::Unwritten { .. }));
}

#[test]
fn a_kernel_accesses_its_own_shared_variables() {
    // addresses 1024 and 1088, of which the kernel names the second one
    let text = |body: &str| {
        let variables = ".shared .align 16 .b8 other[64];\n.shared .align 16 .b8 last[64];\n\
            .extern .shared .align 16 .b8 dynamic[];\n.visible";
        kernel(body).replace(".visible", variables)
    };
    let run = |body: &str, shared_bytes| {
        execute_text(&text(body), &|launch| Launch { shared_bytes, ..launch }).result
    };
    let store = |at: u32| format!("mov.u32 %r5, last;\n@!%p1 st.shared.u32 [%r3+{at}], %r2;");
    let first = |body: &str| format!("setp.ne.s32 %p1, %r2, 0;\n{body}");
    run(&first(&store(1088)), 0).unwrap();
    let is_outside =
        |fault: &Fault| matches!(fault, Fault::OutOfBounds { space: Space::Shared, .. });
    for at in [1024, 1084, 1152] {
        let failure = run(&first(&store(at)), 64).unwrap_err();
        assert!(is_outside(&failure.fault), "{at}: {failure}");
    }
    let dynamic = first(&store(1152)).replace("last", "dynamic");
    run(&dynamic, 64).unwrap();
    assert!(is_outside(&run(&dynamic, 0).unwrap_err().fault));
    assert!(is_outside(&run(&dynamic.replace("1152", "1216"), 64).unwrap_err().fault));
}

#[test]
fn a_failure_names_the_thread_with_the_fault() {
    let body = "setp.eq.s32 %p1, %r2, 39;\nselp.u32 %r5, 4096, %r4, %p1;\nINSTRUCTION";
    for (instruction, thread) in [
        ("st.shared.u32 [%r5], %r2;", 39),
        ("@%p1 ld.shared.u32 %r6, [%r5];", 39),
        ("sub.s32 %r5, %r2, 37;\ndiv.s32 %r6, %r1, %r5;", 37),
    ] {
        let failure = execute(&body.replace("INSTRUCTION", instruction), 1, 64, 3).result;
        assert_eq!(failure.unwrap_err().thread, thread, "{instruction}");
    }
}

#[test]
fn races_between_blocks_are_described() {
    let body = "mov.u32 %r5, %ctaid.x;\nsetp.eq.s32 %p1, %r5, 0;\n@%p1 st.global.u32 [%rd4], %r2;\n\
        @%p1 bra $L__BB0_1;\nld.global.u32 %r6, [%rd4];\nst.global.u32 [%rd4], %r2;\n$L__BB0_1:";
    let text = execute(body, 2, 32, 1).result.unwrap_err().to_string();
    assert!(text.contains("this read and a write by another block"), "{text}");
    let swapped = body.replace("eq.s32", "ne.s32");
    let text = execute(&swapped, 2, 32, 1).result.unwrap_err().to_string();
    assert!(text.contains("this write and a write by another block"), "{text}");
}

#[test]
fn addresses_of_32_bits_wrap_and_loops_end() {
    let body = "sub.s32 %r5, %r4, 128;\nst.shared.u32 [%r4], %r2;\nld.shared.u32 %r6, [%r5+128];\nst.global.u32 [%rd5], %r6;";
    assert_eq!(right(body, 32)[7], 7);
    wrong("$L__BB0_1:\nbra $L__BB0_1;", 32, |fault| matches!(fault, Fault::Endless { .. }));
}

#[test]
fn registers_of_ended_warps_stay_in_use() {
    let body = "setp.lt.s32 %p1, %r2, 128;\nDEC\n@%p1 bra $L__BB0_1;\nsetmaxnreg.inc.sync.aligned.u32 40;\n$L__BB0_1:";
    wrong(&body.replace("DEC", ""), 256, |fault| matches!(fault, Fault::Hang { .. }));
    right(&body.replace("DEC", "setmaxnreg.dec.sync.aligned.u32 24;"), 256);
}

#[test]
fn ended_threads_take_no_part_in_a_barrier_of_a_warp() {
    let body = "st.shared.u32 [%r4], %r2;\nsetp.lt.s32 %p1, %r2, 16;\n@%p1 ret;\n\
        bar.warp.sync 0xffff0000;\nxor.b32 %r5, %r2, OTHER;\nshl.b32 %r5, %r5, 2;\nadd.s32 %r5, %r3, %r5;\n\
        ld.shared.u32 %r6, [%r5];";
    right(&body.replace("OTHER", "15"), 32);
    wrong(&body.replace("OTHER", "31"), 32, is_early);
}

#[test]
fn lanes_wait_for_one_barrier() {
    let body = "setp.ge.s32 %p1, %r2, 2;\n@%p1 bra $L__BB0_1;\nshl.b32 %r5, %r2, 3;\nadd.s32 %r5, %r3, %r5;\nmov.u32 %r8, 1;\n\
        mbarrier.init.shared::cta.b64 [%r5], %r8;\nmov.u32 %r9, 0;\nmbarrier.arrive.shared::cta.b64 _, [%r5];\n\
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], %r9;\n$L__BB0_1:";
    wrong(body, 32, |fault| matches!(fault, Fault::NotSupported(_)));
}

#[test]
fn fences_and_copies_count_in_each_order() {
    let with = |before: &str| BOX.replace("BEFORE", before).replace("WORD", "%r4");
    let body = with("st.shared.u32 [%r4], %r2;").replace("EXPECTED", "");
    // the fence of another thread may come after the copy starts
    let late = body.replace("bar.sync 0;", "bar.sync 0;\nfence.proxy.async.shared::cta;");
    wrong(&late, 64, |fault| matches!(fault, Fault::NoProxyFence { at: 4 }));
    let early = body.replace("bar.sync 0;", "fence.proxy.async.shared::cta;\nbar.sync 0;");
    right(&early, 64);
    // two copies to the same bytes in one phase
    let copy = body.lines().find(|line| line.starts_with("cp.async.bulk")).unwrap().to_owned();
    let twice = with("").replace("EXPECTED", &copy).replace("%r10, 256", "%r10, 512");
    wrong(&twice, 64, |fault| matches!(fault, Fault::Race { .. } | Fault::InFlight { .. }));
}

/// Products of the first warpgroup, whose B the second one writes.
const OVERWRITTEN: &str = "mov.u32 %r10, 0x3f803f80;\nmov.u32 %r11, %r10;\nmov.u32 %r12, %r10;\nmov.u32 %r13, %r10;\n\
    st.shared.u32 [%r4], %r10;\nfence.proxy.async.shared::cta;\nbar.sync 0;\nmov.b64 %rd6, 0x1000080000;\n\
    setp.ge.s32 %p1, %r2, 128;\n@%p1 bra $L__BB0_1;\nwgmma.fence.sync.aligned;\n\
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, {%r10,%r11,%r12,%r13}, %rd6, 0, 1, 1, 0;\n\
    wgmma.commit_group.sync.aligned;\nEARLY\nwgmma.wait_group.sync.aligned 0;\nLATE\nst.global.f32 [%rd5], %f0;\n\
    bra $L__BB0_2;\n$L__BB0_1:\nbar.sync 1, 256;\nst.shared.u32 [%r4+-512], %r2;\n$L__BB0_2:";

#[test]
fn operands_of_products_are_unchanged_until_the_wait() {
    let with = |early: &str, late: &str| OVERWRITTEN.replace("EARLY", early).replace("LATE", late);
    let barrier = "bar.sync 1, 256;";
    assert_eq!(right(&with("", barrier), 256)[0], 16f32.to_bits());
    let is_race = |fault: &Fault| matches!(fault, Fault::Race { access: Access::Write, .. });
    wrong(&with(barrier, ""), 256, is_race);
}

#[test]
fn a_warp_overwrites_its_rows_after_all_warps_have_waited() {
    // A is at address 1024, 16 bytes of each thread
    let body = OVERWRITTEN
        .replace("{%r10,%r11,%r12,%r13}", "%rd7")
        .replace("0, 1, 1, 0;", "0, 1, 1, 0, 0;");
    let body = body.replace(
        "fence.proxy",
        "shl.b32 %r5, %r2, 4;\nxor.b32 %r6, %r5, 16;\nadd.s32 %r5, %r3, %r5;\nadd.s32 %r6, %r3, %r6;\n\
         st.shared.v4.u32 [%r5+1024], {%r10,%r11,%r12,%r13};\nmov.b64 %rd7, 0x1000080040;\nfence.proxy",
    );
    let own = "st.shared.v4.u32 [%r6+1024], {%r2,%r2,%r2,%r2};";
    let run = |early: &str, late: &str, seed| {
        let body = body.replace("EARLY", early).replace("LATE", late);
        let text = kernel(&body).replace("tile[1024]", "tile[8192]");
        execute_text(&text, &|launch| Launch { threads: 128, seed, ..launch })
    };
    let ordered = format!("bar.sync 1, 128;\n{own}");
    for seed in 1..20 {
        let found = run("", &ordered, seed);
        found.result.unwrap();
        assert_eq!(found.b[0], 16f32.to_bits());
        // its own wait is not enough: other warps may still read the rows of A
        for (early, late) in [(own, ""), ("", own)] {
            let fault = run(early, late, seed).result.unwrap_err().fault;
            assert!(matches!(fault, Fault::Race { .. } | Fault::NoProxyFence { .. }), "{fault}");
        }
    }
}
