//! Rules for the tree: directions of imports, lengths of files, configs that load, no paths of one
//! machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use trainer::config::{RunConfig, load};

/// The modules that each module of a crate may import, tests included. Cargo checks imports between
/// crates; `src` uses some of them under the name of the re-export in `src/lib.rs`.
type MayImport = &'static [(&'static str, &'static [&'static str])];

const MAY_IMPORT: [(&str, MayImport); 2] = [
    (
        "crates/engine/src",
        &[
            ("cost", &[]),
            ("tape", &[]),
            ("optim", &["tape"]),
            // `nn` contains no model family.
            ("nn", &["cost", "tape"]),
            ("models", &["cost", "nn", "tape"]),
            ("loss", &["tape"]),
        ],
    ),
    (
        "src",
        &[
            ("metrics", &["files"]),
            // `dist` is for tests only.
            ("checkpoint", &["dist", "files", "ops"]),
            // The only module that uses data, models, losses and optimizers together.
            (
                "train",
                &[
                    "batch",
                    "checkpoint",
                    "data",
                    "dist",
                    "loss",
                    "metrics",
                    "models",
                    "nn",
                    "ops",
                    "optim",
                    "tape",
                ],
            ),
            // Composes the config structs of the sections.
            ("config", &["checkpoint", "convert", "data", "dist", "net", "optim", "train"]),
            // Assembles a run from a config.
            (
                "run",
                &[
                    "batch",
                    "checkpoint",
                    "config",
                    "convert",
                    "data",
                    "dist",
                    "files",
                    "loss",
                    "metrics",
                    "models",
                    "net",
                    "nn",
                    "ops",
                    "optim",
                    "tape",
                    "train",
                ],
            ),
            // Pages for people. `run` opens the data and the model of a run.
            ("report", &["checkpoint", "config", "data", "files", "net", "run", "train"]),
            // The only module that prints, exits and reads the environment (except
            // `TRAINER_SIMD`). `bench` times the ops themselves.
            (
                "cli",
                &[
                    "batch",
                    "checkpoint",
                    "config",
                    "convert",
                    "data",
                    "dist",
                    "files",
                    "metrics",
                    "models",
                    "net",
                    "nn",
                    "ops",
                    "optim",
                    "report",
                    "run",
                    "train",
                ],
            ),
        ],
    ),
];

/// Functions that may have more lines, each with the reason.
const LONGER_FUNCTIONS: [(&str, &str); 1] =
    [("other_commands_refuse_bad_input_as_well", "a list of commands and their errors")];
const MAX_LINES: usize = 800;
const MAX_LINES_OF_A_FUNCTION: usize = 80;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below `folder` with one of these endings, sorted.
pub(super) fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return found };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if path.is_dir() {
            found.extend(files(&path, endings));
        } else if endings.is_empty() || endings.contains(&ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

/// The modules that a source text names: each word after `crate::` and inside `crate::{..}`.
fn named_modules(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let word = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(word(rest));
            continue;
        };
        let mut depth = 0;
        let mut expected = true; // a name of the list's first level
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => expected = true,
                c if expected && c.is_alphabetic() => {
                    found.insert(word(&list[at..]));
                    expected = false;
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn names_of_modules_are_found_in_every_spelling() {
    let text = "use crate::ops::{self, a}; use crate::{batch::{B, C}, tape, self::x}; crate::data::d() \
                pub(in crate::cli) fn f() {}";
    let found: Vec<String> = named_modules(text).into_iter().collect();
    assert_eq!(found, ["batch", "cli", "data", "ops", "self", "tape"]);
}

#[test]
fn imports_follow_the_direction() {
    let mut wrong = Vec::new();
    for (folder, may_import) in MAY_IMPORT {
        let src = root().join(folder);
        let modules: BTreeSet<&str> = may_import.iter().map(|(module, _)| *module).collect();
        let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
        let declared = lib.lines().filter_map(|line| line.strip_prefix("pub mod "));
        let declared: BTreeSet<&str> = declared.filter_map(|name| name.strip_suffix(';')).collect();
        assert_eq!(declared, modules, "the table lists every module");
        for (module, allowed) in may_import {
            let sources = files(&src.join(module), &["rs"]);
            assert!(!sources.is_empty(), "no source of `{module}`");
            let mut used = BTreeSet::new();
            for path in sources {
                for name in named_modules(&fs::read_to_string(&path).unwrap()) {
                    if name != *module && !allowed.contains(&name.as_str()) {
                        wrong.push(format!("{} imports `{name}`", short(&path)));
                    }
                    used.insert(name);
                }
            }
            // Each permission of the table is used.
            for name in *allowed {
                assert!(used.contains(*name), "`{module}` no longer imports `{name}`");
            }
        }
    }
    assert!(wrong.is_empty(), "against the table:\n{}", wrong.join("\n"));
}

/// Source files of the program, its tests and its scripts.
fn sources() -> impl Iterator<Item = PathBuf> {
    let endings = ["rs", "cu", "cuh", "h", "cpp", "py", "sh"];
    let folders = ["src", "crates", "tests", "scripts"];
    folders.into_iter().flat_map(move |folder| files(&root().join(folder), &endings))
}

#[test]
fn source_files_are_short() {
    let mut long = Vec::new();
    for path in sources() {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        if lines > MAX_LINES {
            long.push(format!("{}: {lines} lines", short(&path)));
        }
    }
    assert!(long.is_empty(), "more than {MAX_LINES} lines:\n{}", long.join("\n"));
}

/// Name and number of lines of each function with a body of several lines, as `rustfmt` writes it:
/// the closing brace has the indentation of the first line.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let start = line.trim_start();
        let indent = &line[..line.len() - start.len()];
        let Some((before, name)) = start.split_once("fn ") else { continue };
        let is_function = before.split_whitespace().all(|word| {
            word.starts_with("pub")
                || ["const", "async", "unsafe", "extern", "\"C\""].contains(&word)
                || word.ends_with(')')
        });
        if !is_function || line.ends_with(['}', ';']) {
            continue;
        }
        let after = &lines[first + 1..];
        let end = after.iter().position(|line| {
            let closes = line.strip_prefix(indent).is_some_and(|line| line.starts_with(['}', ')']));
            closes && line.ends_with(['}', ';'])
        });
        let is_declaration = end.is_some_and(|end| after[end].ends_with(';'));
        let name =
            name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        if let Some(end) = end.filter(|_| !is_declaration) {
            found.push((name, end + 2));
        }
    }
    found
}

#[test]
fn functions_are_short() {
    let text = "fn a() {\n    1\n}\nimpl B {\n    pub(in crate::x) const fn c(\n        d: u8,\n    ) {\n\
                \x20       d\n    }\n}\ntrait E {\n    fn f(\n        &self,\n    );\n}\nfn g() {}\n";
    assert_eq!(functions(text), [("a", 3), ("c", 5)]);
    let mut long = Vec::new();
    for path in sources().filter(|path| path.extension().is_some_and(|ending| ending == "rs")) {
        let text = fs::read_to_string(&path).unwrap();
        for (function, lines) in functions(&text) {
            let excepted = LONGER_FUNCTIONS.iter().any(|(name, _reason)| *name == function);
            if lines > MAX_LINES_OF_A_FUNCTION && !excepted {
                long.push(format!("{}: `{function}`: {lines} lines", short(&path)));
            }
        }
    }
    assert!(long.is_empty(), "more than {MAX_LINES_OF_A_FUNCTION} lines:\n{}", long.join("\n"));
}

/// Folders that contain no code for one model family.
const WITHOUT_FAMILIES: [&str; 11] = [
    "crates/dist/src",
    "crates/engine/src/loss",
    "crates/engine/src/nn",
    "crates/engine/src/optim",
    "crates/engine/src/tape",
    "src/checkpoint",
    "src/cli",
    "src/metrics",
    "src/report",
    "src/run",
    "src/train",
];
/// Files of these modules that may name a family, each with the reason.
const NAMES_A_FAMILY: [(&str, &str); 5] = [
    ("src/cli/init.rs", "shapes of published models, and the folder of one in an example"),
    ("src/run/gguf/mod.rs", "names of families in llama.cpp"),
    ("src/run/gguf/tokenizer.rs", "names of tokenizers in llama.cpp"),
    ("src/run/gguf/vision.rs", "names of vision encoders in llama.cpp"),
    ("src/run/stored_weights/tests.rs", "the shapes of a published model, for a test"),
];

#[test]
fn only_models_name_a_family() {
    let mut wrong = Vec::new();
    for path in WITHOUT_FAMILIES.iter().flat_map(|folder| {
        let folder = root().join(folder);
        assert!(folder.is_dir(), "{}", folder.display());
        files(&folder, &["rs"])
    }) {
        let name = short(&path);
        let text = fs::read_to_string(&path).unwrap();
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let found = text.lines().filter(is_code).find(|line| line.to_lowercase().contains("qwen"));
        match (found, NAMES_A_FAMILY.iter().any(|(file, _reason)| *file == name)) {
            (Some(line), false) => wrong.push(format!("{name}: {}", line.trim())),
            (None, true) => wrong.push(format!("{name} no longer names a family")),
            _ => {}
        }
    }
    for (file, _reason) in NAMES_A_FAMILY {
        assert!(root().join(file).is_file(), "{file} does not exist");
    }
    assert!(wrong.is_empty(), "these files name a model family:\n{}", wrong.join("\n"));
}

#[test]
fn every_config_can_be_loaded() {
    let configs = files(&root().join("configs"), &["yaml", "yml"]);
    assert!(configs.iter().any(|path| path.ends_with("quickstart.yaml")));
    for path in configs {
        let name = short(&path);
        let config: RunConfig = load(&path, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        config.check().unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.lines().nth(1).is_some_and(|line| line.starts_with("# ")),
            "{name} has its purpose"
        );
    }
}

#[test]
fn the_quickstart_reads_files_of_the_repository_only() {
    let config: RunConfig = load(&root().join("configs/quickstart.yaml"), &[]).unwrap();
    let sets = config.data.train.iter().chain(&config.data.eval);
    let paths = sets.flat_map(|set| set.path.paths()).chain([&config.model.path]);
    for path in paths {
        assert!(path.is_relative() && root().join(path).exists(), "{}", path.display());
    }
}

/// The first column of the README's tree (a code block with lines such as `src/  what is there`).
fn tree_of(readme: &str) -> Vec<String> {
    let mut names = Vec::new();
    for block in readme.split("```").skip(1).step_by(2) {
        let lines: Vec<&str> = block.lines().skip(1).collect();
        if !lines.iter().any(|line| line.starts_with("src/")) {
            continue;
        }
        let mut parents: Vec<(usize, String)> = Vec::new();
        for line in lines {
            let indent = line.len() - line.trim_start().len();
            let Some(name) = line.split_whitespace().next() else { continue };
            if !name.contains(['/', '.']) {
                continue; // a continued description
            }
            parents.retain(|(at, _)| *at < indent);
            let parent = parents.last().map_or("", |(_, parent)| parent.as_str());
            let path = format!("{parent}{name}");
            if name.ends_with('/') {
                parents.push((indent, path.clone()));
            }
            names.push(path);
        }
    }
    names
}

#[test]
fn the_tree_of_the_readme_lists_the_folders_that_exist() {
    let tree = tree_of(
        "```\nsrc/       the code\n  cli/     commands:\n           sft and so on\nCargo.toml\n```",
    );
    assert_eq!(tree, ["src/", "src/cli/", "Cargo.toml"]);
    let readme = fs::read_to_string(root().join("README.md")).unwrap_or_default();
    let listed = tree_of(&readme);
    for name in &listed {
        assert!(root().join(name).exists(), "README.md names `{name}`, which does not exist");
    }
    for parent in ["src", "crates", "scripts"] {
        for entry in fs::read_dir(root().join(parent)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{parent}/{}/", entry.file_name().to_str().unwrap());
            let is_missing = entry.path().is_dir() && !listed.contains(&name);
            assert!(!is_missing, "the tree of README.md lacks `{name}`");
        }
    }
}

/// Whether `prefix` occurs in `text` at the beginning of a path.
fn begins_a_path(text: &str, prefix: &str) -> bool {
    text.match_indices(prefix).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "_-./}~)>".contains(c))
    })
}

#[test]
fn nothing_names_a_path_of_one_machine_or_a_mirror() {
    // Joined here, so that this file does not contain them.
    let folders = ["work", "root", "home", "Users", "mnt"].map(|name| format!("/{name}/"));
    assert!(begins_a_path(&format!("see `{}a`", folders[0]), &folders[0]));
    assert!(!begins_a_path("frame/work/", &folders[0]));
    let endings =
        ["rs", "toml", "lock", "yaml", "yml", "md", "sh", "py", "json", "jsonl", "txt", ""];
    let mut wrong = Vec::new();
    for entry in fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if ["target", ".git", "runs"].contains(&name) {
            continue;
        }
        let found = if path.is_dir() { files(&path, &endings) } else { vec![path] };
        for path in found {
            // Binary files have no paths.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let has = |folder: &String| begins_a_path(&text, folder);
            if let Some(folder) = folders.iter().find(|folder| has(folder)) {
                wrong.push(format!("{} names `{folder}`", short(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let public = concat!("source = \"registry+https://", "github.com/rust-lang/crates.io-index\"");
    for line in lock.lines().filter(|line| line.starts_with("source")) {
        assert_eq!(line, public, "a crate from elsewhere");
    }
    let settings = fs::read_to_string(root().join(".cargo/config.toml")).unwrap();
    let sections: Vec<&str> = settings.lines().filter(|line| line.starts_with('[')).collect();
    assert_eq!(sections, ["[env]"], "settings of one machine's cargo");
}

/// Errors that reach the command line only inside of others, and `BoxFault` and `TransientFailure`,
/// which are no errors.
const INSIDE_OTHERS: [&str; 11] = [
    "BoxFault",
    "GroundingError",
    "HttpError",
    "ImageError",
    "SampleFault",
    "StdoutError",
    "TemplateError",
    "TransientFailure",
    "TruncationError",
    "UrlError",
    "VideoError",
];

/// Crates and types that are declared once for each alternative of a `#[cfg]`.
const ALTERNATIVES: [(&str, &str); 1] = [("crates/net/src", "Client")];

/// The names of the types that a source text declares outside of its tests. Indented aliases are
/// associated types.
fn declared_types(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter_map(|line| {
        let item = line.trim_start();
        let item = match item.strip_prefix("pub(").and_then(|rest| rest.split_once(") ")) {
            Some((_, item)) => item,
            None => item.strip_prefix("pub ").unwrap_or(item),
        };
        let (keyword, rest) = item.strip_prefix("unsafe ").unwrap_or(item).split_once(' ')?;
        let is_type = match keyword {
            "struct" | "enum" | "union" | "trait" => true,
            "type" => !line.starts_with(' '),
            _ => false,
        };
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next();
        name.filter(|name| is_type && !name.is_empty())
    })
}

#[test]
fn a_type_name_means_one_thing_in_a_crate() {
    let text = "pub(in crate::a) struct A<T>(T);\nimpl B for A {\n    type C = u8;\n}\ntype D = u8;\n\
                pub unsafe trait E {}\n    enum F {}\n#[cfg(test)]\nmod tests {\n    struct G;\n}\n";
    assert_eq!(declared_types(text).collect::<Vec<_>>(), ["A", "D", "E", "F"]);
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let mut folders: Vec<_> = crates.map(|entry| entry.unwrap().path().join("src")).collect();
    folders.push(root().join("src"));
    folders.sort();
    let mut wrong = Vec::new();
    for folder in folders {
        let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for path in files(&folder, &["rs"]) {
            if path.ends_with("tests.rs")
                || path.components().any(|part| part.as_os_str() == "tests")
            {
                continue;
            }
            for name in declared_types(&fs::read_to_string(&path).unwrap()) {
                places.entry(name.to_owned()).or_default().push(short(&path));
            }
        }
        for (name, places) in places {
            let is_excepted = ALTERNATIVES.contains(&(short(&folder).as_str(), name.as_str()));
            if places.len() > 1 && !is_excepted {
                wrong.push(format!("`{name}`: {}", places.join(", ")));
            }
        }
    }
    assert!(wrong.is_empty(), "these names have several meanings:\n{}", wrong.join("\n"));
}

#[test]
fn the_command_line_lists_every_error_with_an_exit_code() {
    let report = fs::read_to_string(root().join("src/cli/error_report.rs")).unwrap();
    let (_, list) = report.split_once("one_of! {").unwrap();
    let known: BTreeSet<&str> = list.split('}').next().unwrap().split(',').map(str::trim).collect();
    let mut sources = files(&root().join("src"), &["rs"]);
    sources.extend(files(&root().join("crates"), &["rs"]));
    sources.retain(|path| !short(path).starts_with("crates/fault"));
    let mut found = BTreeSet::from(["Failure".to_owned()]); // without the derive macro
    for path in sources {
        let text = fs::read_to_string(&path).unwrap();
        for (at, _) in text.match_indices("#[derive(") {
            let (traits, item) = text[at..].split_once(")]").unwrap();
            let mut traits = traits.split(|c: char| !c.is_alphanumeric());
            if !traits.any(|name| name == "Fault") {
                continue;
            }
            let mut words = item.split_whitespace();
            words.find(|word| ["enum", "struct"].contains(word));
            let name = words.next().unwrap();
            found.insert(name.split(['(', ';', '<']).next().unwrap().to_owned());
        }
    }
    let expected: BTreeSet<&str> = known.iter().chain(&INSIDE_OTHERS).copied().collect();
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let different: Vec<_> = found.symmetric_difference(&expected).collect();
    assert!(different.is_empty(), "src/cli/error_report.rs and the source differ in {different:?}");
}
