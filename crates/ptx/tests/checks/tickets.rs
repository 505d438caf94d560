//! Blocks that take tickets, and blocks that wait for others.

use super::{Run, execute};
use ptx::Fault;

/// Three blocks add 1e8, 1 and -1e8 in the order of their tickets: each waits for the one before. `a[0]` is
/// 100 and the number of blocks that have added, `a[1]` 101 and that of tickets. `b` has the sums.
const IN_TURN: &str = "setp.ne.u32 %p1, %r2, 0;\n@%p1 bra $tickets;\n\
    atom.global.add.u32 %r5, [%rd1+4], 1;\nst.shared.u32 [%r3], %r5;\n$tickets:\nbar.sync 0;\n\
    ld.shared.u32 %r5, [%r3];\nmul.wide.u32 %rd6, %r2, 16;\nadd.s64 %rd6, %rd2, %rd6;\n\
    setp.eq.u32 %p2, %r5, 101;\n@%p2 bra $first;\n@%p1 bra $next;\n\
    $wait:\nld.acquire.gpu.global.u32 %r6, [%rd1];\nadd.s32 %r6, %r6, 1;\n\
    setp.ne.u32 %p3, %r6, %r5;\n@%p3 bra $wait;\n$next:\nbar.sync 0;\n\
    setp.eq.u32 %p3, %r5, 102;\nmov.f32 %f1, 0f3F800000;\n@!%p3 mov.f32 %f1, 0fCCBEBC20;\n\
    red.relaxed.gpu.global.add.v4.f32 [%rd6], {%f1, %f1, %f1, %f1};\nbra $added;\n\
    $first:\nmov.f32 %f1, 0f4CBEBC20;\nst.global.v4.f32 [%rd6], {%f1, %f1, %f1, %f1};\n\
    $added:\nbar.sync 0;\n@%p1 bra $end;\nred.release.gpu.global.add.u32 [%rd1], 1;\n$end:";

#[test]
fn blocks_that_wait_for_smaller_tickets_add_in_one_order() {
    let of = |body: &str, seed| execute(body, 3, 32, seed);
    let mut counts = Vec::new();
    for seed in 1..20 {
        let Run { b, result } = of(IN_TURN, seed);
        let found = result.unwrap_or_else(|failure| panic!("{failure}"));
        counts.push((found.instructions, found.branches, found.global_written));
        assert_eq!(b[..128], [0; 128], "seed {seed}: in another order, the sum would be 1");
    }
    assert!(counts.iter().all(|of| *of == counts[0]), "{counts:?}");
    let fails = |body: &str, is_expected: &dyn Fn(&Fault) -> bool| {
        for seed in 1..20 {
            let Err(failure) = of(body, seed).result else { panic!("seed {seed}: no fault") };
            assert!(is_expected(&failure.fault), "seed {seed}: {failure}");
        }
    };
    let races = |fault: &Fault| matches!(fault, Fault::BlockRace { .. });
    fails(&IN_TURN.replace("red.release", "red.relaxed"), &races);
    fails(&IN_TURN.replace("ld.acquire", "ld.relaxed"), &races);
    // no wait: in some orders, a sum that nothing has started, or a race
    let early = IN_TURN.replace("@%p3 bra $wait;", "");
    let faults = (1..20).filter_map(|seed| of(&early, seed).result.err());
    let faults: Vec<Fault> = faults.map(|failure| failure.fault).collect();
    assert!(!faults.is_empty());
    for fault in faults {
        assert!(matches!(fault, Fault::Unwritten { .. }) || races(&fault), "{fault}");
    }
    // the last block does not add to the number
    let hangs = |fault: &Fault| matches!(fault, Fault::Hang { .. });
    fails(&IN_TURN.replace("[%rd1], 1;\n$end", "[%rd1], 2;\n$end"), &hangs);
}

/// Three blocks take 64 tickets, from 100 on, and write their number for each.
#[test]
fn blocks_take_tickets_in_many_orders() {
    let body = "mov.u32 %r6, %ctaid.x;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra $end;\n\
        $next:\natom.global.add.u32 %r5, [%rd1], 1;\nsub.s32 %r5, %r5, 100;\n\
        setp.gt.u32 %p2, %r5, 63;\n@%p2 bra $end;\nmul.wide.u32 %rd6, %r5, 4;\n\
        add.s64 %rd6, %rd2, %rd6;\nst.global.u32 [%rd6], %r6;\nbra $next;\n$end:";
    let mut found = std::collections::HashSet::new();
    for seed in 1..40 {
        let Run { b, result } = execute(body, 3, 32, seed);
        result.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(b[..64].iter().all(|block| *block < 3), "{b:?}");
        found.insert(b[..64].to_vec());
    }
    // without an order, the first block would take all
    let shared = found.iter().filter(|all| all.iter().any(|block| *block != all[0]));
    assert!(shared.count() > 1 && found.iter().any(|all| all[0] != 0), "{found:?}");
}

/// A GPU may begin blocks in any order, and those that have started end before others start.
#[test]
fn blocks_that_wait_for_others_by_their_number_may_hang() {
    let body = IN_TURN.replace(
        "atom.global.add.u32 %r5, [%rd1+4], 1;",
        "mov.u32 %r5, %ctaid.x;\nadd.s32 %r5, %r5, 101;",
    );
    let hangs = |seed: &u64| match execute(&body, 3, 32, *seed).result {
        Ok(_) => false,
        Err(failure) => matches!(failure.fault, Fault::Hang { .. }) || panic!("{failure}"),
    };
    let number = (1..60).filter(hangs).count();
    assert!((1..59).contains(&number), "{number} of 59 orders hang");
}
