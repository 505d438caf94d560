//! Each opcode, with its operands.

use super::*;

#[test]
fn arithmetic_with_its_types() {
    let (a, b, c) = (at(r(2)), at(r(3)), at(r(4)));
    assert_scalar("add.s32 %r1, %r2, %r3;", Scalar::Add(Type::S32, Round::Nearest), r(1), &[a, b]);
    assert_scalar("mad.lo.s32 %r1, %r2, %r3, %r4;", Scalar::MadLow(Type::S32), r(1), &[a, b, c]);
    assert_scalar("mul.hi.s32 %r1, %r2, %r3;", Scalar::MulHigh(Type::S32), r(1), &[a, b]);
    assert_scalar(
        "mul.lo.s64 %rd1, %rd2, 3;",
        Scalar::MulLow(Type::S64),
        rd(1),
        &[at(rd(2)), value(3)],
    );
    assert_scalar("mul.wide.s32 %rd1, %r2, %r3;", Scalar::MulWide(Type::S32), rd(1), &[a, b]);
    assert_scalar(
        "mul.wide.u16 %r1, %rs2, 4;",
        Scalar::MulWide(Type::U16),
        r(1),
        &[at(rs(2)), value(4)],
    );
    assert_scalar("div.u32 %r1, %r2, %r3;", Scalar::Div(Type::U32), r(1), &[a, b]);
    assert_scalar("rem.s32 %r1, %r2, %r3;", Scalar::Rem(Type::S32), r(1), &[a, b]);
    assert_scalar("max.s32 %r1, %r2, %r3;", Scalar::Max(Type::S32), r(1), &[a, b]);
    assert_scalar("neg.s32 %r1, %r2;", Scalar::Neg(Type::S32), r(1), &[a]);
    let (x, y, z) = (at(f(2)), at(f(3)), at(f(4)));
    let down = Scalar::Fma(Type::F32, Round::Down);
    assert_scalar("fma.rm.f32 %f1, %f2, %f3, %f4;", down, f(1), &[x, y, z]);
    let zero = Scalar::Add(Type::F32, Round::Zero);
    assert_scalar("add.rz.f32 %f1, %f2, %f3;", zero, f(1), &[x, y]);
    let product = Scalar::MulFloat(Type::F32, Round::Nearest);
    assert_scalar("mul.f32 %f1, %f2, %f3;", product, f(1), &[x, y]);
    assert_scalar("mul.rn.f32 %f1, %f2, %f3;", product, f(1), &[x, y]);
    assert_scalar("div.approx.f32 %f1, %f2, %f3;", Scalar::DivApprox, f(1), &[x, y]);
    assert_scalar("div.rn.f32 %f1, %f2, %f3;", Scalar::Div(Type::F32), f(1), &[x, y]);
    assert_scalar("sqrt.rn.f64 %fd1, %fd2;", Scalar::Sqrt(Type::F64), fd(1), &[at(fd(2))]);
    assert_scalar("ex2.approx.f32 %f1, %f2;", Scalar::Ex2 { flush: false }, f(1), &[x]);
    assert_scalar("ex2.approx.ftz.f32 %f1, %f2;", Scalar::Ex2 { flush: true }, f(1), &[x]);
    assert_scalar("lg2.approx.f32 %f1, %f2;", Scalar::Lg2, f(1), &[x]);
    assert_scalar("rcp.rn.f32 %f1, %f2;", Scalar::Rcp, f(1), &[x]);
    assert_scalar("rsqrt.approx.f32 %f1, %f2;", Scalar::Rsqrt, f(1), &[x]);
}

#[test]
fn bits_and_comparisons() {
    assert_scalar("and.pred %p1, %p2, %p3;", Scalar::And(Type::Pred), p(1), &[at(p(2)), at(p(3))]);
    assert_scalar("not.b64 %rd1, %rd2;", Scalar::Not(Type::B64), rd(1), &[at(rd(2))]);
    assert_scalar(
        "shl.b64 %rd1, %rd2, %r3;",
        Scalar::Shl(Type::B64),
        rd(1),
        &[at(rd(2)), at(r(3))],
    );
    assert_scalar("shr.u16 %rs1, %rs2, 4;", Scalar::Shr(Type::U16), rs(1), &[at(rs(2)), value(4)]);
    let insert = Scalar::BitFieldInsert(Type::B32);
    assert_scalar(
        "bfi.b32 %r1, %r2, %r3, 3, 29;",
        insert,
        r(1),
        &[at(r(2)), at(r(3)), value(3), value(29)],
    );
    assert_scalar(
        "prmt.b32 %r1, %r2, %r3, 0x5410;",
        Scalar::Permute,
        r(1),
        &[at(r(2)), at(r(3)), value(0x5410)],
    );
    assert_scalar(
        "selp.u16 %rs1, 1, 0, %p3;",
        Scalar::Select(Type::U16),
        rs(1),
        &[value(1), ZERO, at(p(3))],
    );
    let compare = Scalar::Compare(Compare::Leu, Type::F64);
    let operands = [at(fd(1)), value(1f64.to_bits())];
    assert_scalar("setp.leu.f64 %p1, %fd1, 0d3FF0000000000000;", compare, p(1), &operands);
    let compare = Scalar::Compare(Compare::Nan, Type::F32);
    assert_scalar("setp.nan.f32 %p1, %f1, %f1;", compare, p(1), &[at(f(1)), at(f(1))]);
}

#[test]
fn conversions() {
    let convert = Scalar::Convert { from: Type::S32, to: Type::S64 };
    assert_scalar("cvt.s64.s32 %rd1, %r1;", convert, rd(1), &[at(r(1))]);
    // Registers may be wider.
    assert_scalar("cvt.s64.s32 %rd1, %rd2;", convert, rd(1), &[at(rd(2))]);
    let convert = Scalar::Convert { from: Type::U32, to: Type::U16 };
    assert_scalar("cvt.u16.u32 %r1, %r2;", convert, r(1), &[at(r(2))]);
    let convert = Scalar::FloatOf { from: Type::U16, to: Type::F32 };
    assert_scalar("cvt.rn.f32.u16 %f1, %rs1;", convert, f(1), &[at(rs(1))]);
    assert_scalar("cvt.f64.f32 %fd1, %f1;", Scalar::Widen, fd(1), &[at(f(1))]);
    assert_scalar("cvt.rn.f32.f64 %f1, %fd1;", Scalar::Narrow, f(1), &[at(fd(1))]);
    assert_scalar("cvt.sat.f32.f32 %f1, %f2;", Scalar::Saturate, f(1), &[at(f(2))]);
    assert_scalar("cvt.rn.bf16.f32 %rs1, %f2;", Scalar::Bf16, rs(1), &[at(f(2))]);
    let operands = [at(f(1)), at(f(2))];
    assert_scalar("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", Scalar::Bf16Pair, r(1), &operands);
    // It would be extended by its sign.
    assert_error(
        "cvt.s32.s64 %rd1, %rd2;",
        "`%rd1` of `.b64` in `cvt.s32.s64`",
        "a register of `.s32`",
    );
    assert_error(
        "cvt.rn.bf16.f32 %r1, %f2;",
        "`%r1` of `.b32` in `cvt.rn.bf16.f32`",
        "a register of `.b16`",
    );
    assert_error(
        "cvt.u64.u32 %rd1, %rs1;",
        "`%rs1` of `.b16` in `cvt.u64.u32`",
        "a register of at least `.u32`",
    );
}

#[test]
fn literals() {
    let mov = |line: &str, ty, to, expected| {
        assert_scalar(line, Scalar::Mov(ty), to, &[value(expected)]);
    };
    mov("mov.u32 %r1, -1;", Type::U32, r(1), 0xffff_ffff);
    mov("mov.u16 %rs1, -2;", Type::U16, rs(1), 0xfffe);
    mov("mov.u32 %r1, 0x1ffffffff;", Type::U32, r(1), 0xffff_ffff);
    mov("mov.u64 %rd1, 18446744073709551615;", Type::U64, rd(1), u64::MAX);
    mov("mov.b64 %rd1, -9223372036854775808;", Type::B64, rd(1), 1 << 63);
    mov("mov.f32 %f1, 0f3F800000;", Type::F32, f(1), 0x3f80_0000);
    mov("mov.b32 %r1, 0fBF800000;", Type::B32, r(1), 0xbf80_0000);
    mov("mov.f64 %fd1, 0d3FF0000000000000;", Type::F64, fd(1), 1f64.to_bits());
    mov("mov.pred %p1, 0;", Type::Pred, p(1), 0);
    mov("mov.pred %p1, 1;", Type::Pred, p(1), 1);
    mov("mov.pred %p1, -1;", Type::Pred, p(1), 1);
    let wrong = |line: &str, literal: &str, opcode: &str, ty: &str| {
        let found = format!("`{literal}` in `{opcode}`");
        assert_error(line, &found, &format!("a literal of `.{ty}`"));
    };
    wrong("add.f32 %f1, %f2, 1;", "1", "add.f32", "f32");
    wrong("mov.f32 %f1, 0d3FF0000000000000;", "0d3FF0000000000000", "mov.f32", "f32");
    wrong("mov.f32 %f1, 0f3F80;", "0f3F80", "mov.f32", "f32");
    wrong("add.s32 %r1, %r2, 0f3F800000;", "0f3F800000", "add.s32", "s32");
    wrong("mov.u32 %r1, 017;", "017", "mov.u32", "u32");
    wrong("mov.u32 %r1, 1U;", "1U", "mov.u32", "u32");
    wrong("mov.u64 %rd1, 18446744073709551616;", "18446744073709551616", "mov.u64", "u64");
    wrong("mov.s64 %rd1, -9223372036854775809;", "-9223372036854775809", "mov.s64", "s64");
}

#[test]
fn moves_of_special_registers_and_lists() {
    let special = |line: &str, special| {
        assert_scalar(line, Scalar::Mov(Type::U32), r(1), &[Operand::Special(special)]);
    };
    special("mov.u32 %r1, %tid.x;", Special::Thread);
    special("mov.u32 %r1, %ntid.x;", Special::Threads);
    special("mov.u32 %r1, %ctaid.y;", Special::Block(1));
    special("mov.u32 %r1, %nctaid.z;", Special::Blocks(2));
    assert_error("mov.u32 %r1, %tid.y;", "`%tid.y` in `mov.u32`", "a register of `.u32`");
    assert_error("mov.u64 %rd1, %tid.x;", "`%tid.x` in `mov.u64`", "a register of `.u64`");
    assert_error("add.s32 %r1, %r2, %tid.x;", "`%tid.x` in `add.s32`", "a register of `.s32`");
    assert_op(
        "mov.b32 %r1, {%rs1, %rs2};",
        &Op::Pack { to: r(1), from: vec![at(rs(1)), at(rs(2))] },
    );
    assert_op("mov.b64 %fd1, {%r1,%r2};", &Op::Pack { to: fd(1), from: vec![at(r(1)), at(r(2))] });
    let to = vec![Some(rs(1)), None];
    assert_op("mov.b32 {%rs1, _}, %r1;", &Op::Unpack { to, from: at(r(1)) });
    let to = vec![Some(rs(0)), Some(rs(1)), Some(rs(2)), Some(rs(3))];
    assert_op("mov.b64 {%rs0, %rs1, %rs2, %rs3}, %rd1;", &Op::Unpack { to, from: at(rd(1)) });
    // "Vectors as Operands": what is written must be unique; `mov`: not only sinks
    let different = "different registers";
    assert_error("mov.b64 {%r1, %r1}, %rd1;", "`{%r1, %r1}` in `mov.b64`", different);
    assert_error("mov.b64 {_, _}, %rd1;", "`{_, _}` in `mov.b64`", different);
    let load = "ld.global.v2.u32";
    assert_error(
        &format!("{load} {{%r1, %r1}}, [%rd1];"),
        &format!("`{{%r1, %r1}}` in `{load}`"),
        different,
    );
    let load = "ldmatrix.sync.aligned.m8n8.x2.shared.b16";
    assert_error(
        &format!("{load} {{%r1, %r1}}, [%r2];"),
        &format!("`{{%r1, %r1}}` in `{load}`"),
        different,
    );
    assert_op("mov.b64 %rd1, {%r1, %r1};", &Op::Pack { to: rd(1), from: vec![at(r(1)), at(r(1))] });
    let list = "a register, or a list of `.b32` or `.b64` with 2 or 4 elements";
    assert_error("mov.u32 %r1, {%rs1, %rs2};", "`{%rs1, %rs2}` in `mov.u32`", list);
    assert_error("mov.b64 %rd1, {%r1, %r2, %r3};", "`{%r1, %r2, %r3}` in `mov.b64`", list);
    assert_error(
        "mov.b64 %rd1, {%r1, %rs2};",
        "`%rs2` of `.b16` in `mov.b64`",
        "a register of `.b32`",
    );
}

#[test]
fn types_of_registers() {
    let wrong = |line: &str, register: &str, opcode: &str, ty: &str| {
        let found = format!(
            "`{}` of `.{}` in `{opcode}`",
            register,
            match &register[..2] {
                "%p" => "pred",
                "%f" if register.starts_with("%fd") => "f64",
                "%f" => "f32",
                _ if register.starts_with("%rd") => "b64",
                _ if register.starts_with("%rs") => "b16",
                _ => "b32",
            }
        );
        assert_error(line, &found, &format!("a register of `.{ty}`"));
    };
    wrong("add.s32 %r1, %r2, %rd3;", "%rd3", "add.s32", "s32");
    wrong("add.s64 %rd1, %r2, %rd3;", "%r2", "add.s64", "s64");
    wrong("add.s32 %f1, %r2, %r3;", "%f1", "add.s32", "s32");
    wrong("add.f32 %f1, %f2, %fd1;", "%fd1", "add.f32", "f32");
    wrong("shl.b64 %rd1, %rd2, %rd3;", "%rd3", "shl.b64", "u32");
    wrong("and.b32 %r1, %p2, %r3;", "%p2", "and.b32", "b32");
    wrong("and.pred %p1, %r2, %p3;", "%r2", "and.pred", "pred");
    wrong("mul.wide.s32 %r1, %r2, %r3;", "%r1", "mul.wide.s32", "s64");
    wrong("selp.b32 %r1, %r2, %r3, %r4;", "%r4", "selp.b32", "pred");
    wrong("setp.eq.s32 %r1, %r2, %r3;", "%r1", "setp.eq.s32", "pred");
    wrong("ld.global.u32 %r1, [%r2];", "%r2", "ld.global.u32", "u64");
    wrong("@%r1 ret;", "%r1", "@", "pred");
    // Untyped registers are any type of their width.
    let kind = Scalar::Add(Type::F32, Round::Nearest);
    assert_scalar("add.f32 %r1, %r2, %f3;", kind, r(1), &[at(r(2)), at(f(3))]);
    assert_error("neg.s32 %r1, %r9;", "`%r9` in `neg.s32`", "a register of `.s32`");
}

#[test]
fn loads_and_stores() {
    let load = |space, bytes, signed, to: &[Reg], from| Op::Load {
        space,
        bytes,
        signed,
        to: to.to_vec(),
        from,
    };
    let (global, shared) = (Space::Global, Space::Shared);
    let from = address(at(rd(1)), 16);
    assert_op("ld.global.f32 %f1, [%rd1+16];", &load(global, 4, false, &[f(1)], from));
    let from = address(at(r(1)), -4);
    assert_op("ld.shared.u32 %r2, [%r1+-4];", &load(shared, 4, false, &[r(2)], from));
    let from = address(at(rd(1)), 0);
    assert_op("ld.shared.f64 %fd1, [%rd1];", &load(shared, 8, false, &[fd(1)], from));
    assert_op("ld.global.u8 %rs1, [%rd1];", &load(global, 1, false, &[rs(1)], from));
    assert_op("ld.global.u16 %r1, [%rd1];", &load(global, 2, false, &[r(1)], from));
    assert_op("ld.global.s8 %r1, [%rd1];", &load(global, 1, true, &[r(1)], from));
    assert_op("ld.global.s32 %r1, [%rd1];", &load(global, 4, false, &[r(1)], from));
    let four = [f(1), f(2), f(3), f(4)];
    assert_op(
        "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];",
        &load(global, 4, false, &four, from),
    );
    let param = load(Space::Param, 4, true, &[rd(2)], address(value(8), 0));
    assert_op("ld.param.s32 %rd2, [k_param_1];", &param);
    let param = load(Space::Param, 4, false, &[r(2)], address(value(0), 4));
    assert_op("ld.param.u32 %r2, [k_param_0+4];", &param);
    let store =
        |space, bytes, to, from: &[Operand]| Op::Store { space, bytes, to, from: from.to_vec() };
    let to = address(at(rd(1)), 0);
    assert_op("st.global.u8 [%rd1], %rs1;", &store(global, 1, to, &[at(rs(1))]));
    assert_op("st.global.f32 [%rd1], 0f3F800000;", &store(global, 4, to, &[value(0x3f80_0000)]));
    assert_op("st.shared.u8 [%rd1], -1;", &store(shared, 1, to, &[value(0xff)]));
    assert_op(
        "st.global.wb.v2.u32 [%rd1], {%r1,%r2};",
        &store(global, 4, to, &[at(r(1)), at(r(2))]),
    );
    let wrong = |line: &str, found: &str, expected: &str| assert_error(line, found, expected);
    wrong(
        "ld.global.u32 %rs1, [%rd1];",
        "`%rs1` of `.b16` in `ld.global.u32`",
        "a register of at least `.u32`",
    );
    wrong(
        "ld.global.u8 %p1, [%rd1];",
        "`%p1` of `.pred` in `ld.global.u8`",
        "a register of at least `.u8`",
    );
    wrong(
        "ld.global.f32 %rd1, [%rd1];",
        "`%rd1` of `.b64` in `ld.global.f32`",
        "a register of at least `.f32`",
    );
    wrong(
        "st.global.u32 [%rd1], %rs1;",
        "`%rs1` of `.b16` in `st.global.u32`",
        "a register of at least `.u32`",
    );
    wrong("st.global.v2.u32 [%rd1], %r1;", "`%r1` in `st.global.v2.u32`", "a list of 2 operands");
    wrong(
        "ld.global.u32 {%r1, %r2}, [%rd1];",
        "`{%r1, %r2}` in `ld.global.u32`",
        "a register of at least `.u32`",
    );
    wrong("ld.global.u32 %r1, %rd1;", "`%rd1` in `ld.global.u32`", "an address in brackets");
    wrong(
        "ld.param.u32 %r1, [other];",
        "`[other+0]` in `ld.param.u32`",
        "an address of the space Param",
    );
    wrong(
        "ld.shared.u32 %r1, [k_param_0];",
        "`[k_param_0+0]` in `ld.shared.u32`",
        "an address of the space Shared",
    );
    wrong("ld.global.u32 %r1, [%rd1-4];", "`-4`", "`]`");
    wrong("ld.global.u32 %r1, [4096];", "`4096`", "a register or a variable");
}

#[test]
fn opcodes_that_are_not_understood() {
    let opcodes = [
        "ld.u32",
        "st.u32",
        "ld.local.u32",
        "st.local.u32",
        "ld.global.nc.u32",
        "ld.global.v4.f64",
        "ld.volatile.global.u32",
        "st.shared.wb.u32",
        "st.param.u32",
        "ld.global.pred",
        "ld.global.f16",
        "ld.global.v3.u32",
        "ld",
        "cvta.shared.u64",
        "cvta.to.shared.u64",
        "cvta.local.u64",
        "cvta.global.u64",
        "add.ftz.f32",
        "add",
        "add.u8",
        "add.rp.f32",
        "add.rn.s32",
        "add.sat.s32",
        "add.b32",
        "mul.s32",
        "mul.wide.s64",
        "mad.hi.s32",
        "fma.f32",
        "div.f32",
        "div.full.f32",
        "rcp.approx.f32",
        "sqrt.approx.f32",
        "lg2.approx.ftz.f32",
        "neg.u32",
        "and.s32",
        "shl.s32",
        "bfi.b16",
        "prmt.b32.f4e",
        "selp.pred",
        "setp.lt.b32",
        "setp.ltu.s32",
        "setp.lo.u32",
        "setp.eq.and.s32",
        "setp.eq.pred",
        "cvt.rni.s32.f32",
        "cvt.f32.s32",
        "cvt.u32.u8",
        "cvt.rn.f64.f32",
        "cvt.rz.bf16.f32",
        "mov.f16",
        "mov",
        "call.uni",
        "shfl.sync.bfly.u32",
        "shfl.bfly.b32",
        "shfl.sync.other.b32",
        "bar.red.popc.u32",
        "barrier.sync",
        "membar.gl",
        "atom.global.exch.b32",
        "cp.async.ca.shared.global",
        "cp.async.wait_all",
        "cp.async.bulk.commit_group",
        "mbarrier.init.shared.b64",
        "mbarrier.inval.shared::cta.b64",
        "fence.proxy.async",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n08k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16",
        "bra.other",
        "ret.uni",
        "trap",
    ];
    for opcode in opcodes {
        assert_unknown(opcode);
    }
}

#[test]
fn barriers_and_warps() {
    let five = "%r2, 16, 31, -1;";
    let from = [at(r(2)), value(16), value(31), value(0xffff_ffff)];
    let (mode, to) = (Shuffle::Butterfly, r(1));
    let shuffle = Op::Shuffle { mode, to, in_range: Some(p(1)), from };
    assert_op(&format!("shfl.sync.bfly.b32 %r1|%p1, {five}"), &shuffle);
    let shuffle = Op::Shuffle { mode: Shuffle::Down, to, in_range: None, from };
    assert_op(&format!("shfl.sync.down.b32 %r1, {five}"), &shuffle);
    assert_op("bar.warp.sync -1;", &Op::WarpBarrier { mask: value(0xffff_ffff) });
    assert_op("bar.sync 0;", &Op::Barrier { waits: true, id: ZERO, threads: None });
    let threads = Some(value(128));
    assert_op("bar.sync %r1, 128;", &Op::Barrier { waits: true, id: at(r(1)), threads });
    assert_op("bar.arrive %r1, 128;", &Op::Barrier { waits: false, id: at(r(1)), threads });
    let place = address(at(r(1)), 0);
    let init = Op::MemoryBarrierInit { at: place, count: at(r(2)) };
    assert_op("mbarrier.init.shared::cta.b64 [%r1], %r2;", &init);
    let arrive = Op::MemoryBarrierArrive { at: place, bytes: None };
    assert_op("mbarrier.arrive.shared::cta.b64 _, [%r1];", &arrive);
    let arrive = Op::MemoryBarrierArrive { at: place, bytes: Some(at(r(2))) };
    assert_op("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;", &arrive);
    let wait = Op::MemoryBarrierTryWait { to: p(1), at: place, parity: at(r(2)) };
    assert_op("mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;", &wait);
    let opcode = "mbarrier.arrive.shared::cta.b64";
    assert_error(&format!("{opcode} %rd1, [%r1];"), &format!("`%rd1` in `{opcode}`"), "`_`");
    assert_op("fence.mbarrier_init.release.cluster;", &Op::FenceInit);
    assert_op("fence.proxy.async.shared::cta;", &Op::FenceProxy);
    let set = Op::SetMaxRegs { increases: true, regs: 240 };
    assert_op("setmaxnreg.inc.sync.aligned.u32 240;", &set);
    let set = Op::SetMaxRegs { increases: false, regs: 24 };
    assert_op("setmaxnreg.dec.sync.aligned.u32 24;", &set);
    assert!(parse(&text("setmaxnreg.dec.sync.aligned.u32 25;")).is_err());
}

#[test]
fn copies() {
    let (to, from) = (address(at(r(1)), 0), address(at(rd(1)), 0));
    let copy = Op::CopyAsync { to, from, size: Some(at(r(2))) };
    assert_op("cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", &copy);
    let copy = Op::CopyAsync { to, from, size: None };
    assert_op("cp.async.cg.shared.global [%r1], [%rd1], 16;", &copy);
    let found = "`8` in `cp.async.cg.shared.global`";
    assert_error("cp.async.cg.shared.global [%r1], [%rd1], 8;", found, "one of the constants [16]");
    assert_op("cp.async.commit_group;", &Op::CopyCommit);
    assert_op("cp.async.wait_group 2;", &Op::CopyWait { pending: value(2) });
    let found = "`%r1` in `cp.async.wait_group`";
    assert_error("cp.async.wait_group %r1;", found, "a constant");
    let opcode = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes";
    let copy = Op::CopyBox {
        to,
        map: at(rd(1)),
        at: vec![at(r(2)), value(1), at(r(3))],
        barrier: address(at(r(4)), 8),
    };
    assert_op(&format!("{opcode} [%r1], [%rd1, {{%r2, 1, %r3}}], [%r4+8];"), &copy);
    assert_error(
        &format!("{opcode} [%r1], [%rd1, {{%r2, %r3}}], [%r4];"),
        &format!("`[%rd1, {{%r2, %r3}}]` in `{opcode}`"),
        "3 coordinates",
    );
}

#[test]
fn matrices() {
    let from = address(at(r(5)), 0);
    let load = Op::LoadMatrix { to: vec![r(1), r(2), r(3), r(4)], from, transposed: false };
    assert_op("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];", &load);
    let load = Op::LoadMatrix { to: vec![r(1), r(2)], from, transposed: true };
    assert_op("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r1,%r2}, [%r5];", &load);
    let mma = Op::Mma {
        d: [f(0), f(1), f(2), f(3)],
        a: [at(r(1)), at(r(2)), at(r(3)), at(r(4))],
        b: [at(r(5)), at(r(6))],
        c: [at(f(4)), at(f(5)), at(f(6)), ZERO],
    };
    let opcode = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32";
    let line = "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f4,%f5,%f6,0f00000000};";
    assert_op(&format!("{opcode} {line}"), &mma);
    let found = format!("`{{%r5}}` in `{opcode}`");
    let line = "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5}, {%f4,%f5,%f6,%f7};";
    assert_error(&format!("{opcode} {line}"), &found, "a list of 2 operands");
}

#[test]
fn products_of_warpgroups() {
    let opcode = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16";
    let sums = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}";
    let product = |a, adds, transpose| {
        let d = (0..8).map(f).collect();
        Op::WarpgroupMma(Box::new(WarpgroupMma { n: 16, d, a, b: at(rd(2)), adds, transpose }))
    };
    let expected = product(MatrixA::Descriptor(at(rd(1))), at(p(1)), [false, true]);
    assert_op(&format!("{opcode} {sums}, %rd1, %rd2, %p1, 1, 1, 0, 1;"), &expected);
    let a = MatrixA::Regs([at(r(1)), at(r(2)), at(r(3)), at(r(4))]);
    let expected = product(a, value(1), [false, true]);
    assert_op(&format!("{opcode} {sums}, {{%r1,%r2,%r3,%r4}}, %rd2, 1, 1, 1, 1;"), &expected);
    let found = format!("7 operands of `{opcode}`");
    assert_error(&format!("{opcode} {sums}, %rd1, %rd2, %p1, 1, 1, 0;"), &found, "8");
    let found = format!("`-1` in `{opcode}`");
    let expected = "1, which does not negate an operand";
    assert_error(&format!("{opcode} {sums}, %rd1, %rd2, %p1, 1, -1, 0, 0;"), &found, expected);
    let found = format!("`{{%f0, %f1}}` in `{opcode}`");
    let line = format!("{opcode} {{%f0, %f1}}, %rd1, %rd2, %p1, 1, 1, 0, 0;");
    assert_error(&line, &found, "a list of 8 operands");
    assert_op("wgmma.fence.sync.aligned;", &Op::WarpgroupFence);
    assert_op("wgmma.commit_group.sync.aligned;", &Op::WarpgroupCommit);
    assert_op("wgmma.wait_group.sync.aligned 1;", &Op::WarpgroupWait { pending: 1 });
}
