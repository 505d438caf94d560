//! Circles of imports between source files: each file can be read before the files that import it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of circles inside each top-level folder; between folders there are none.
const MAX_INSIDE: usize = 3;

/// Segments of a path from the crate's root: `["data", "config"]`.
type Segments = Vec<String>;

/// A source file without its tests.
#[derive(Default)]
struct Source {
    /// Code outside of `use` lines.
    code: String,
    /// Imported names and their paths.
    imports: BTreeMap<String, Segments>,
    /// Names that other files may import from here, defined elsewhere.
    exports: BTreeMap<String, Segments>,
}

/// All sources by module path.
struct Sources(BTreeMap<Segments, Source>);

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn segments(path: &str) -> Segments {
    path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// `a::{b, c::{self, D as E}}` as `(name, path)`: `(b, a::b)`, `(c, a::c)`, `(E, a::c::D)`.
fn expand(prefix: &[String], tree: &str, found: &mut Vec<(String, Segments)>) {
    let mut depth = 0;
    let parts = tree.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
        let (head, list) = part.split_once('{').unwrap_or((part, ""));
        let (head, alias) = head.split_once(" as ").unwrap_or((head, ""));
        let mut path = [prefix, &segments(head)].concat();
        if let Some(list) = list.strip_suffix('}') {
            expand(&path, list, found);
            continue;
        }
        if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
            path.pop();
        }
        let name = if alias.is_empty() { path.last().cloned() } else { Some(alias.to_owned()) };
        found.push((name.unwrap_or_default(), path));
    }
}

/// Returns the source text without comments, `mod` lines and tests, and the names of test modules
/// in separate files.
fn without_tests(text: &str) -> (String, BTreeSet<String>) {
    let mut files = BTreeSet::new();
    let mut kept = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line == "#[cfg(test)]" {
            match lines.next().and_then(|line| line.strip_prefix("mod ")?.strip_suffix(';')) {
                Some(name) => files.insert(name.to_owned()),
                None => break, // the tests are at the end of a file
            };
        } else {
            let is_module = line.contains("mod ") && line.ends_with(';');
            kept.push(if is_module { "" } else { line.split("//").next().unwrap_or_default() });
        }
    }
    (kept.join("\n"), files)
}

impl Sources {
    fn read(src: &Path) -> Self {
        let mut texts = BTreeMap::new();
        let mut tests = BTreeSet::new();
        for path in super::architecture::files(src, &["rs"]) {
            let module = path.strip_prefix(src).unwrap().with_extension("");
            let mut module: Segments =
                module.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if module == ["lib"] || module == ["main"] {
                continue;
            }
            if module.last().is_some_and(|last| last == "mod") {
                module.pop();
            }
            let (text, files) = without_tests(&fs::read_to_string(&path).unwrap());
            tests.extend(files.into_iter().map(|name| [module.clone(), vec![name]].concat()));
            texts.insert(module, text);
        }
        texts.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        let mut sources = Self(texts.keys().map(|m| (m.clone(), Source::default())).collect());
        for (module, text) in texts {
            let source = sources.parse(&module, &text);
            sources.0.insert(module, source);
        }
        sources
    }

    fn parse(&self, module: &Segments, text: &str) -> Source {
        let mut source = Source::default();
        let mut rest = text;
        while let Some(at) = rest.find("use ") {
            let line = rest[..at].rfind('\n').map_or(0, |end| end + 1);
            let before = rest[line..at].trim();
            let is_use = before.is_empty() || (before.starts_with("pub") && !before.contains('='));
            let end = if is_use { rest[at..].find(';') } else { None };
            source.code.push_str(&rest[..if is_use { line } else { at + 4 }]);
            let Some(end) = end.map(|end| at + end) else {
                rest = &rest[at + 4..];
                continue;
            };
            let mut found = Vec::new();
            expand(&[], &rest[at + 4..end].replace('\n', " "), &mut found);
            for (name, path) in found {
                let Some(path) = self.absolute(module, &source, &path) else { continue };
                if before.starts_with("pub") {
                    source.exports.insert(name.clone(), path.clone());
                }
                source.imports.insert(name, path);
            }
            rest = &rest[end + 1..];
        }
        source.code.push_str(rest);
        source
    }

    /// The path from the crate's root; `None` for other crates and for items of the same file.
    fn absolute(&self, module: &Segments, source: &Source, path: &[String]) -> Option<Segments> {
        let (first, rest) = path.split_first()?;
        let parent = || module[..module.len() - 1].to_vec();
        let start = match first.as_str() {
            "crate" => Vec::new(),
            "self" => module.clone(),
            "super" if rest.first().is_some_and(|next| next == "super") => {
                return self.absolute(&parent(), source, rest);
            }
            "super" => parent(),
            first => match source.imports.get(first) {
                Some(imported) if !rest.is_empty() => imported.clone(),
                _ => [module.clone(), vec![first.to_owned()]].concat(),
            },
        };
        let is_ours = start.is_empty() || self.0.contains_key(&start);
        is_ours.then(|| [start, rest.to_vec()].concat())
    }

    /// The module that defines the item at `path`, re-exports followed.
    fn defining(&self, path: &[String]) -> Option<Segments> {
        let module = (1..=path.len()).rev().find(|len| self.0.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(module);
        let exported = rest.first().and_then(|name| self.0[module].exports.get(name));
        match exported {
            Some(exported) => self.defining(&[exported.clone(), rest[1..].to_vec()].concat()),
            None => Some(module.to_vec()),
        }
    }

    /// The modules that a module imports.
    fn imported(&self, module: &Segments) -> BTreeSet<Segments> {
        let source = &self.0[module];
        let words = source.code.split(|c| !is_word(c) && c != ':');
        let words: BTreeSet<&str> = words.collect();
        // A name that is only re-exported does not count as an import.
        let is_used = |name: &String| {
            let mut parts = words.iter().flat_map(|word| word.split(':'));
            !source.exports.contains_key(name) || parts.any(|part| part == name)
        };
        let used = source.imports.iter().filter(|(name, _)| is_used(name)).map(|(_, path)| path);
        let mut paths: Vec<Segments> = used.cloned().collect();
        let written = words.iter().filter(|word| word.contains("::"));
        paths.extend(written.filter_map(|word| self.absolute(module, source, &segments(word))));
        let found = paths.iter().filter_map(|path| self.defining(path));
        found.filter(|found| found != module).collect()
    }

    /// Groups of modules that import each other, directly or through others.
    fn circles(&self) -> BTreeSet<BTreeSet<Segments>> {
        let edges: BTreeMap<&Segments, BTreeSet<Segments>> =
            self.0.keys().map(|module| (module, self.imported(module))).collect();
        let reachable = |start: &Segments| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![start.clone()]);
            while let Some(module) = next.pop() {
                let new = edges[&module].iter().filter(|module| seen.insert((*module).clone()));
                next.extend(new.cloned());
            }
            seen
        };
        let reach: BTreeMap<&Segments, _> = self.0.keys().map(|m| (m, reachable(m))).collect();
        let circle = |module: &Segments| {
            let mutual = reach[module].iter().filter(|other| reach[other].contains(module));
            mutual.cloned().collect::<BTreeSet<_>>()
        };
        self.0.keys().map(circle).filter(|circle| circle.len() > 1).collect()
    }
}

#[test]
fn a_circle_is_found_through_a_re_export() {
    let folder = tempfile::tempdir().unwrap();
    let src = folder.path();
    let write = |path: &str, text: &str| {
        let path: PathBuf = src.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        super::harness::write(&path, text.as_bytes());
    };
    write("a/mod.rs", "mod x;\nmod y;\npub use x::{X, Z as Renamed};\n");
    write(
        "a/x.rs",
        "use super::y;\npub struct X(y::Y);\n#[cfg(test)]\nmod tests { use crate::b; }",
    );
    write("a/y.rs", "use crate::a::Renamed; // a comment\npub struct Y;\n");
    write("b.rs", "use crate::a::X;\n");
    let circles: Vec<_> = Sources::read(src).circles().into_iter().collect();
    let circle: BTreeSet<Segments> = ["a::x", "a::y"].map(segments).into();
    assert_eq!(circles, [circle]);
}

#[test]
fn files_of_different_folders_import_in_one_direction_and_circles_inside_are_few() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut inside: BTreeMap<String, usize> = BTreeMap::new();
    let mut count = |crate_name: &str, folders_are_walls: bool| {
        for circle in &Sources::read(&root.join(crate_name).join("src")).circles() {
            let files: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            println!("circle in {crate_name}: {}", files.join(", "));
            let folders: BTreeSet<&String> = circle.iter().map(|module| &module[0]).collect();
            let folder = if folders_are_walls {
                assert!(folders.len() == 1, "a circle between folders: {files:?}");
                folders.first().unwrap().as_str()
            } else {
                "src"
            };
            *inside.entry(format!("{crate_name}/{folder}")).or_default() += 1;
        }
    };
    count("", true);
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        count(&format!("crates/{name}"), name == "engine");
    }
    let many: Vec<_> = inside.iter().filter(|(_, count)| **count > MAX_INSIDE).collect();
    assert!(many.is_empty(), "circles by folder: {many:?}");
}
