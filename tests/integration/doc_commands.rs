//! The commands of the documentation run as written.
//!
//! Every `bash` block of README.md, CONTRIBUTING.md and docs/ runs in a folder laid out like the
//! repository, with the tested binary instead of `cargo run --release --`. A block that cannot run
//! here begins with a comment of `KINDS`. So a block either runs or has the reason in its first line.
//! Blocks of other languages (`text`, `json`, ..) are illustrations and must not begin with a command.

use super::harness::{Output, Place, binary, finish};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// First lines of blocks that cannot run here: all kinds of what they need besides the binary.
const KINDS: [&str; 6] = [
    "# needs a GPU",
    "# needs Python",
    "# needs MPI",
    "# needs FFmpeg",
    "# needs several machines",
    "# takes minutes",
];

/// Languages of the blocks of a page.
const LANGUAGES: [&str; 6] = ["bash", "text", "yaml", "json", "jsonl", "python"];

/// First words of commands.
const COMMANDS: [&str; 12] = [
    "apt-get", "bash", "cargo", "docker", "git", "mpirun", "pip", "python", "python3", "sh",
    "torchrun", "trainer",
];

/// Commands that compile. The test binary and the program are built already.
const COMPILES: [&str; 6] =
    ["cargo build", "cargo test", "cargo clippy", "cargo fmt", "cargo doc", "cargo check"];

const RUN: &str = "cargo run --release --";

/// Parts of the repository that commands read. They write to `runs`, `models`, `my` and so on,
/// which are folders of the sandbox.
const LINKED: [&str; 8] =
    ["configs", "crates", "data", "docs", "scripts", "src", "tests", "Cargo.toml"];

/// A block of a page.
struct Block {
    /// Number of the line after the opening fence, from 1.
    line: usize,
    language: String,
    /// Text without the indentation of a list item.
    text: String,
}

/// The `bash` blocks of a page, in order.
fn bash_blocks(page: &str) -> Vec<Block> {
    blocks(page).into_iter().filter(|block| block.language == "bash").collect()
}

/// The blocks of a page, in order.
fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let content = line.trim_start();
        if !content.starts_with("```") {
            continue;
        }
        let indent = line.len() - content.len();
        let mut text = String::new();
        for (_, line) in lines.by_ref().take_while(|(_, line)| line.trim() != "```") {
            let unindented = line.get(indent..).unwrap_or_default();
            text.push_str(unindented);
            text.push('\n');
        }
        let language = content.trim_start_matches('`').to_owned();
        blocks.push(Block { line: at + 2, language, text });
    }
    blocks
}

/// The script that runs a block with `binary`; `None` if it is marked or has no command left.
fn script(block: &str, binary: &str) -> Option<String> {
    let first = block.lines().next().unwrap_or_default();
    if KINDS.iter().any(|mark| first.starts_with(mark)) {
        return None;
    }
    let runs = |line: &&str| !COMPILES.iter().any(|command| line.starts_with(command));
    let lines: Vec<&str> = block.lines().filter(runs).collect();
    let is_command = |line: &&str| !line.trim().is_empty() && !line.starts_with('#');
    if !lines.iter().any(is_command) {
        return None;
    }
    Some(lines.join("\n").replace(RUN, &format!("'{binary}'")))
}

/// Markdown files below a folder, sorted.
fn pages_below(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    let mut pages = Vec::new();
    for path in entries {
        if path.is_dir() {
            pages.extend(pages_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    pages
}

/// A folder laid out like the repository, with small stand-ins for what a user has.
fn sandbox() -> Place {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = Place::empty();
    for name in LINKED {
        symlink(root.join(name), place.path(name)).unwrap();
    }
    // An image and rows of the user. README.md writes the same rows, and the model folder.
    fs::create_dir(place.path("my")).unwrap();
    for name in ["cat.png", "my/cat.png"] {
        let photo = root.join("tests/golden/data/images/exact_chelsea_256x288.png");
        fs::copy(photo, place.path(name)).unwrap();
    }
    let row = concat!(
        r#"{"messages": [{"role": "user", "content": "<image>What is shown?"}, "#,
        r#"{"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}"#,
    );
    for name in ["my/rows.jsonl", "my/held_out.jsonl"] {
        place.write(name, &format!("{row}\n"));
    }
    place
}

fn run(place: &Place, script: &str) -> Output {
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script]).current_dir(place.path("."));
    bash.stdin(Stdio::null());
    for name in ["RUST_LOG", "RAYON_NUM_THREADS", "TRAINER_SIMD"] {
        bash.env_remove(name);
    }
    finish(&mut bash)
}

#[test]
fn every_command_of_the_documentation_runs_as_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = sandbox();
    // README.md first: other pages use the model folder and the quickstart that it makes.
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    pages.extend(pages_below(&root.join("docs")));
    let mut num_run = 0;
    let mut failures = Vec::new();
    for page in pages {
        let name = page.strip_prefix(root).unwrap().display().to_string();
        for block in bash_blocks(&fs::read_to_string(&page).unwrap()) {
            let Some(script) = script(&block.text, &binary()) else {
                continue;
            };
            num_run += 1;
            let output = run(&place, &script);
            if output.code != 0 {
                let Output { code, stderr, .. } = output;
                failures
                    .push(format!("{name}:{}: exit code {code}\n{script}\n{stderr}", block.line));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(num_run >= 6, "only {num_run} blocks ran");
}

/// Whether a line begins with a command. A synopsis, with `|` or `..` for what a user writes, is none.
fn is_command(line: &str) -> bool {
    let mut words = line.split(' ').skip_while(|word| word.contains('='));
    let is_synopsis = line.contains('|') || line.contains("..");
    !is_synopsis && words.next().is_some_and(|word| COMMANDS.contains(&word))
}

#[test]
fn commands_differ_from_output_and_from_a_synopsis() {
    for line in
        ["cargo test", "RAYON_NUM_THREADS=8 mpirun -n 4 \\", "trainer check --config a.yaml"]
    {
        assert!(is_command(line), "{line}");
    }
    for line in ["INFO train step=1", "trainer convert --from a|b FILE", "src/  the code", ""] {
        assert!(!is_command(line), "{line}");
    }
}

#[test]
fn a_command_is_in_a_block_that_runs_or_has_the_reason_why_it_cannot() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    pages.extend(pages_below(&root.join("docs")));
    let mut unused: Vec<&str> = KINDS.to_vec();
    let mut wrong = Vec::new();
    for page in pages {
        let name = page.strip_prefix(root).unwrap().display().to_string();
        for block in blocks(&fs::read_to_string(&page).unwrap()) {
            let first = block.text.lines().next().unwrap_or_default();
            let place = format!("{name}:{}: `{first}`", block.line);
            if !LANGUAGES.contains(&block.language.as_str()) {
                wrong.push(format!("{place}: the language is `{}`", block.language));
            } else if block.language == "bash" {
                let is_kind = |kind: &&str| first.starts_with(kind);
                let reason = first.starts_with("# needs") || first.starts_with("# takes");
                if reason && !KINDS.iter().any(is_kind) {
                    wrong.push(format!("{place} is no kind of block that cannot run"));
                }
                unused.retain(|kind| !is_kind(kind));
            } else if block.language == "text" && is_command(first) {
                wrong.push(format!("{place}: a command, expected a block `bash`"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(unused.is_empty(), "no block is of these kinds: {unused:?}");
}

#[test]
fn blocks_of_a_page_are_found_and_marked_ones_are_skipped() {
    let page = "a\n```bash\nls\n```\n1. b\n   ```bash\n   cat <<'END'\n     x\n   END\n   ```\n\
                ```text\n```\n```bash\n# needs Python\npip\n```\n```bash\ncargo test\n```\n\
                ```bash\ncargo run --release -- init \\\n    --out a\n```\n";
    let blocks = bash_blocks(page);
    let lines: Vec<usize> = blocks.iter().map(|block| block.line).collect();
    assert_eq!(lines, [3, 7, 14, 18, 21]);
    assert_eq!(blocks[1].text, "cat <<'END'\n  x\nEND\n");
    let scripts: Vec<Option<String>> =
        blocks.iter().map(|block| script(&block.text, "/t")).collect();
    assert_eq!(scripts[0].as_deref(), Some("ls"));
    assert!(scripts[2].is_none() && scripts[3].is_none());
    assert_eq!(scripts[4].as_deref(), Some("'/t' init \\\n    --out a"));
}
