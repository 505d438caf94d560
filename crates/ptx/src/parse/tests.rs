//! Small texts for each rule; all real kernels with `PTX_FILES`.

mod instructions;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::parse;
use crate::instruction::{
    Address, Compare, Guard, Kernel, MatrixA, Op, Operand, Param, Reg, Round, Scalar, Shuffle,
    Space, Special, Type, WarpgroupMma,
};

const HEAD: &str = ".version 9.0\n.target sm_90a\n.address_size 64\n";
/// Two lines: the first instruction is in line 7 of a text with [`HEAD`].
const ENTRY: &str = ".visible .entry k(.param .u64 k_param_0, .param .u32 k_param_1)\n{\n";
const REGS: &str = ".reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<9>; .reg .b64 %rd<5>; \
                    .reg .f32 %f<16>; .reg .f64 %fd<3>;\n";
const ZERO: Operand = Operand::Immediate(0);

fn p(number: u32) -> Reg {
    Reg(number)
}

fn rs(number: u32) -> Reg {
    Reg(4 + number)
}

fn r(number: u32) -> Reg {
    Reg(8 + number)
}

fn rd(number: u32) -> Reg {
    Reg(17 + number)
}

fn f(number: u32) -> Reg {
    Reg(22 + number)
}

fn fd(number: u32) -> Reg {
    Reg(38 + number)
}

fn at(reg: Reg) -> Operand {
    Operand::Reg(reg)
}

fn value(value: u64) -> Operand {
    Operand::Immediate(value)
}

fn address(base: Operand, offset: i64) -> Address {
    Address { base, offset }
}

/// A text of one kernel with these lines.
fn text(lines: &str) -> String {
    format!("{HEAD}{ENTRY}{REGS}{lines}\nret;\n}}\n")
}

fn parse_kernel(text: &str) -> Arc<Kernel> {
    let module = parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    Arc::clone(&module.kernels[0])
}

fn kernel(lines: &str) -> Arc<Kernel> {
    parse_kernel(&text(lines))
}

/// `Op` has no equality, but its text shows all of it.
#[track_caller]
fn assert_op(line: &str, expected: &Op) {
    let kernel = kernel(line);
    assert_eq!(kernel.code.len(), 2, "{line}");
    assert_eq!(format!("{:?}", kernel.code[0].op), format!("{expected:?}"), "{line}");
}

#[track_caller]
fn assert_scalar(line: &str, kind: Scalar, to: Reg, operands: &[Operand]) {
    let mut from = [ZERO; 4];
    from[..operands.len()].copy_from_slice(operands);
    assert_op(line, &Op::Scalar { kind, to, from });
}

/// The message of the only error, in line 7 if it is in the first line.
#[track_caller]
fn assert_error(lines: &str, found: &str, expected: &str) {
    assert_error_in(&text(lines), 7, found, expected);
}

#[track_caller]
fn assert_error_in(text: &str, line: u32, found: &str, expected: &str) {
    let error = parse(text).expect_err("the text is wrong");
    let message = format!("line {line} of the PTX: found {found}, expected {expected}");
    assert_eq!(error.to_string(), message, "{text}");
}

#[track_caller]
fn assert_unknown(opcode: &str) {
    let found = format!("`{opcode}`");
    assert_error(&format!("{opcode} %r1, %r2, %r3;"), &found, "an opcode that is understood");
}

#[test]
fn wrong_statements() {
    assert_error("add.s32 %r1, %r2;", "2 operands of `add.s32`", "3");
    assert_error("bar.sync;", "0 operands of `bar.sync`", "1 or 2");
    assert_error("bar.arrive 1;", "1 operands of `bar.arrive`", "2");
    assert_error("neg.s32 %r1|%p1, %r2;", "`%r1|%p1` in `neg.s32`", "a register of `.s32`");
    assert_error("neg.s32 %r1, [%r2];", "`[%r2+0]` in `neg.s32`", "a register of `.s32`");
    assert_error("neg.s32 %r1, !%r2;", "`!`", "an operand");
    assert_error("neg.s32 %r1, %r2 %r3;", "`%r3`", "`;`");
    assert_error(".local .b32 x;", "`.local`", "an instruction, a label or a directive");
    assert_error(".reg .b8 %b<3>;", "registers of 8 bits", "other ones");
    assert_error(".reg .v4 %b;", "`.v4`", "a type that is understood");
    assert_error(".reg .b32 %r<3>;", "a second declaration of `%r0`", "a new name");
    assert_error(".reg .b32 %x<1048577>;", "`1048577`", "a number of registers");
    assert_error(".pragma \"other\";", "`\"other\"`", "`\"nounroll\"` or a `\"used_bytes_mask\"`");
    assert_error("bra next;", "a branch to `next`", "a label of this scope");
    assert_error("a: a: ret;", "a second declaration of `a`", "a new name");
    assert_error("neg.s32 %r1, %r2 # x;", "`#`", "a character of PTX");
    assert_error("/* x */", "`/`", "a character of PTX");
    assert_error(".pragma \"x", "a quote", "a text that ends in the same line");
    assert_error(
        "{ .shared .b32 x; }",
        "`.shared`",
        "variables only in the outer scope of a kernel",
    );
    assert_error(".loc 0 1 1", "`0`", "the number of a file, from 1");
    let end = format!("{HEAD}{ENTRY}{REGS}@%p1 ret;\n}}\n");
    let expected = "`ret` or a branch before it";
    assert_error_in(&end, 9, "the end of the kernel `k`", expected);
    let end = format!("{HEAD}{ENTRY}{REGS}bra a;\na:\n}}\n");
    assert_error_in(&end, 7, "a branch to `a`", "a label before an instruction");
    let open = format!("{HEAD}{ENTRY}ret;");
    assert_error_in(&open, 6, "the end of the text", "an instruction, a label or a directive");
}

#[test]
fn lines_statements_and_sources() {
    let lines = "\
.loc 1 20 3 // a comment; with a semicolon
@%p1 bra $L__BB0_1; neg.s32 %r1, %r2;
.loc 2 30 5, function_name $L__info_string0, inlined_at 1 171 3
.pragma \"nounroll\";
$L__BB0_1:
@!%p2 add.s32
    %r1,
    %r2, -3;
bra.uni $L__BB0_1;";
    let files = ".file 1 \"a//a.cu\"\n.file 2 \"b.cuh\"\n\
                 .section .debug_str\n{\n$L__info_string0:\n.b8 95,90\n}\n";
    let kernel = parse_kernel(&format!("{}{files}", text(lines)));
    let positions: Vec<_> = kernel.code.iter().map(|at| (at.line, at.source)).collect();
    let (first, second) = ((1, 20), (2, 30));
    assert_eq!(positions, [(8, first), (8, first), (12, second), (15, second), (16, second)]);
    assert_eq!(kernel.code[0].guard, Some(Guard { predicate: p(1), negated: false }));
    assert!(matches!(kernel.code[0].op, Op::Branch { target: 2, uniform: false }));
    assert_eq!(kernel.code[1].guard, None);
    assert_eq!(kernel.code[2].guard, Some(Guard { predicate: p(2), negated: true }));
    assert!(matches!(kernel.code[3].op, Op::Branch { target: 2, uniform: true }));
    assert_eq!(*kernel.sources, ["", "a//a.cu", "b.cuh"]);
    let missing = format!("{}.file 2 \"b.cuh\"\n", text(".loc 1 2 3\n"));
    assert_error_in(&missing, 9, "an instruction of file 1", "`.file 1`");
    // Without `.loc`.
    assert_eq!(self::kernel("").code[0].source, (0, 0));
}

#[test]
fn scopes() {
    let lines = "\
{.reg .pred %p1; .reg .b32 x;
mov.pred %p1, 0; bra a;
{ .reg .b64 x; mov.b64 x, 1; bra a; a: mov.u32 %r1, 2; bra b; }
a: mov.u32 x, 3; }
{ .reg .b64 x;
a: mov.b64 x, 4; bra a; }
mov.pred %p1, 0;
b:";
    let kernel = kernel(lines);
    let (outer, inner, other) = (Reg(42), Reg(43), Reg(44));
    assert_eq!(kernel.regs[41..], ["%p1", "x", "x", "x"]);
    assert_eq!(kernel.reg_bits[41..], [1, 32, 64, 64]);
    let what: Vec<_> = kernel
        .code
        .iter()
        .map(|at| match at.op {
            Op::Scalar { to, .. } => Ok(to),
            Op::Branch { target, .. } => Err(target),
            _ => Err(100),
        })
        .collect();
    let expected = [
        Ok(Reg(41)),
        Err(6),
        Ok(inner),
        Err(4),
        Ok(r(1)),
        Err(10),
        Ok(outer),
        Ok(other),
        Err(7),
        Ok(p(1)),
        Err(100),
    ];
    assert_eq!(what, expected);
    assert_error("{ .reg .b32 x; } mov.u32 x, 1;", "`x` in `mov.u32`", "a register of `.u32`");
    assert_error("{ a: ret; } bra a;", "a branch to `a`", "a label of this scope");
}

#[test]
fn parameters_and_limits() {
    let head = ".visible .entry k(\n.param .u32 a,\n.param .align 8 .b8 b[20],\n.param .f32 c,\n\
                .param .align 128 .b8 d[128],\n.param .u8 e,\n.param .u64 f\n)\n\
                .maxntid 256, 1, 1\n.minnctapersm 4\n{\n.reg .b64 %rd<5>;\n\
                mov.b64 %rd0, d; mov.u64 %rd1, f; cvta.param.u64 %rd2, %rd0;\n\
                cvta.to.global.u64 %rd3, %rd1;\nret;\n}";
    let kernel = parse_kernel(head);
    let param = |name: &str, offset, bytes| Param { name: name.to_owned(), offset, bytes };
    let expected = [
        param("a", 0, 4),
        param("b", 8, 20),
        param("c", 28, 4),
        param("d", 128, 128),
        param("e", 256, 1),
        param("f", 264, 8),
    ];
    assert_eq!(kernel.params, expected);
    assert_eq!(kernel.param_bytes, 272);
    assert_eq!(kernel.max_threads, 256);
    assert_eq!((kernel.shared_ranges.len(), kernel.dynamic_shared), (0, None));
    let ops: Vec<_> = kernel.code.iter().map(|at| format!("{:?}", at.op)).collect();
    let mov = |to, offset| Op::Scalar {
        kind: Scalar::Mov(if to == 0 { Type::B64 } else { Type::U64 }),
        to: Reg(to),
        from: [value(offset), ZERO, ZERO, ZERO],
    };
    let expected = [
        mov(0, 128),
        mov(1, 264),
        Op::ParamAddress { to: Reg(2), from: at(Reg(0)) },
        Op::ToGlobal { to: Reg(3), from: at(Reg(1)) },
        Op::Exit,
    ];
    assert_eq!(ops, expected.map(|op| format!("{op:?}")));
    let empty = parse_kernel(".visible .entry k()\n{ ret; }");
    assert_eq!((empty.params.len(), empty.max_threads), (0, 0));
}

#[test]
fn shared_variables() {
    let text = "\
.shared .align 4 .b8 first[6];
.extern .shared .align 128 .b8 dynamic[];
.visible .entry a() {
.shared .align 16 .b8 own[100];
.reg .b32 %r<3>;
mov.u32 %r1, own;
ld.shared.u32 %r2, [first+4];
ret; }
.visible .entry b() {
.reg .b32 %r<3>;
.reg .b64 %rd<3>;
mov.u64 %rd1, dynamic;
ret; }
.shared .f64 last;
.visible .entry c() {
.shared .align 4 .b8 own[4];
.reg .b32 %r<3>;
st.shared.f64 [last], 0d0000000000000000;
st.shared.f32 [own], 0f00000000;
ret; }
.visible .entry d() {
ret; }
";
    let module = parse(text).expect("the text is right");
    let op = |kernel: usize, at: usize| format!("{:?}", module.kernels[kernel].code[at].op);
    // first: 0 to 6; own of a: 16 to 116; last: 120 to 128; own of c: 128 to 132; dynamic: 256.
    assert!(op(0, 0).contains("Immediate(16)"), "{}", op(0, 0));
    assert!(op(0, 1).contains("base: Immediate(0), offset: 4"), "{}", op(0, 1));
    assert!(op(1, 0).contains("Immediate(256)"), "{}", op(1, 0));
    assert!(op(2, 0).contains("Immediate(120)"), "{}", op(2, 0));
    assert!(op(2, 1).contains("Immediate(128)"), "{}", op(2, 1));
    let memory = |kernel: usize| {
        let kernel = &module.kernels[kernel];
        (&kernel.shared_ranges[..], kernel.dynamic_shared)
    };
    assert_eq!(memory(0), (&[0..6, 16..116][..], None));
    assert_eq!(memory(1), (&[][..], Some(256)));
    assert_eq!(memory(2), (&[120..128, 128..132][..], None));
    assert_eq!(memory(3), (&[][..], None));
    let twice = ".shared .b32 a;\n.shared .b32 a;\n";
    assert_error_in(twice, 3, "a second declaration of `a`", "a new name");
    assert_error_in(".shared .align 3 .b8 a[4];", 1, "`3`", "an alignment, a power of two");
    assert_error_in(".shared .b8 a[];", 1, "`]`", "a number of elements");
    assert_error_in(".extern .shared .b8 a[4];", 1, "`4`", "`]`");
    assert_error_in(".extern .global .b8 a[4];", 1, "`.global`", "`.shared`");
    // Not known before its declaration, nor in other kernels.
    let early = ".visible .entry a() {\n.reg .b32 %r;\nmov.u32 %r, x;\nret; }\n.shared .b32 x;";
    assert_error_in(early, 3, "`x` in `mov.u32`", "a register of `.u32`");
}

#[test]
fn sizes_of_stores_and_products() {
    let sizes = |lines: &str| {
        let kernel = kernel(lines);
        (kernel.shared_shift, kernel.global_shift, kernel.has_products)
    };
    assert_eq!(sizes(""), (2, 4, false));
    let stores = "st.shared.v2.b16 [%r1], {%rs1, %rs2};\nst.global.v2.f32 [%rd1], {%f1, %f2};";
    assert_eq!(sizes(stores), (2, 3, false));
    assert_eq!(sizes(&format!("{stores}\nst.shared.b16 [%r1], %rs1;")), (1, 3, false));
    assert_eq!(sizes(&format!("{stores}\nst.global.u8 [%rd1], %r1;")), (2, 0, false));
    let product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, 1, 1, 1, 0, 0;";
    assert_eq!(sizes(product), (2, 4, true));
}

#[test]
fn module_scope() {
    let wrong = |text: &str, found: &str, expected: &str| assert_error_in(text, 1, found, expected);
    let directive = "a directive of the module scope";
    wrong(".func f()", "`.func`", directive);
    wrong(".weak .entry f()", "`.weak`", directive);
    wrong(".global .b32 x;", "`.global`", directive);
    wrong(".version 9", "`9`", "a version such as `9.0`");
    wrong(".target other", "`other`", "a target such as `sm_80`");
    wrong(".address_size 32", "`32`", "`64`");
    wrong(".section .text { }", "`.text`", "a section of debug information");
    wrong(".file 0 \"a\"", "`0`", "the number of a file, from 1, not given before");
    wrong(".file 1 \"a\" .file 1 \"a\"", "`1`", "the number of a file, from 1, not given before");
    wrong(".visible .func f()", "`.func`", "`.entry`");
    wrong(".visible .entry f(.reg .b32 x)", "`.reg`", "`.param`");
    wrong(".visible .entry f(.param .u64 .ptr .shared x)", "`.ptr`", "a name");
    wrong(".visible .entry f() .reqntid 4", "`.reqntid`", "`.maxntid`, `.minnctapersm` or `{`");
    wrong(".visible .entry f() .maxntid 16, 2", "`2`", "`1`");
    wrong(
        ".visible .entry f() { ret; } .visible .entry f() { ret; }",
        "another one",
        "one kernel named `f`",
    );
}

#[test]
fn used_bytes() {
    let load = "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r1];";
    let kernel = kernel(&format!(".pragma \"used_bytes_mask 4095\";\n{load}\n{load}"));
    assert_eq!(kernel.used_bytes.clone().into_iter().collect::<Vec<_>>(), [(0, 4095)]);
    let wrong = |mask: u32, line: &str, opcode: &str| {
        let text = text(&format!(".pragma \"used_bytes_mask {mask}\"; {line}"));
        let expected = format!("a load of the bytes of the mask {mask}");
        assert_error_in(&text, 7, &format!("`{opcode}`"), &expected);
    };
    wrong(65536, load, "ld.shared.v4.f32");
    wrong(1, "neg.s32 %r1, %r2;", "neg.s32");
    let twice = ".pragma \"used_bytes_mask 1\"; .pragma \"used_bytes_mask 1\";";
    assert_error(twice, "`\"used_bytes_mask 1\"`", "one mask of 32 bits");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the folder has regular files only")]
#[ignore = "needs the environment variable PTX_FILES, a folder of PTX files"]
fn files() {
    let folder = std::env::var("PTX_FILES").expect("PTX_FILES names a folder");
    let (mut kernels, mut instructions) = (0, 0);
    for path in ptx_files(Path::new(&folder)) {
        let text = std::fs::read_to_string(&path).expect("the file is text");
        let module = parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let code = |kernel: &Arc<Kernel>| kernel.code.len();
        let count: usize = module.kernels.iter().map(code).sum();
        let entries = text.lines().filter(|line| line.starts_with(".visible .entry")).count();
        assert_eq!(module.kernels.len(), entries, "{}", path.display());
        assert_eq!(count, statements(&text), "{}", path.display());
        kernels += entries;
        instructions += count;
    }
    assert!(kernels > 0, "no kernel below {folder}");
    println!("{kernels} kernels, {instructions} instructions");
}

fn ptx_files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the entry can be read").path();
        if path.is_dir() {
            found.extend(ptx_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "ptx") {
            found.insert(path);
        }
    }
    found
}

/// Number of statements that end with `;` and are not directives.
fn statements(text: &str) -> usize {
    let lines = text.lines().filter_map(|line| line.split("//").next());
    lines
        .filter(|line| !line.trim_start().starts_with('.'))
        .flat_map(|line| line.split_inclusive(';').filter(|part| part.ends_with(';')))
        .filter(|part| !part.trim_start_matches(['{', '}', ' ', '\t']).starts_with('.'))
        .count()
}
