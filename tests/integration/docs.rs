//! The manual matches the program: keys and defaults, example rows, reasons, names of tests, links.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use trainer::data::DatasetRows;
use trainer::data::{DatasetConfig, Encoder, ImageConfig, RowReader, TransientFailure};
use trainer::dist::Launched;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

fn temporary(name: &str, content: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::File::create(&path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, content.as_bytes()))
        .unwrap();
    (folder, path)
}

/// What stands between the first pair of backticks of a table's cell.
fn code(cell: &str) -> Option<&str> {
    cell.split('`').nth(1)
}

/// The cells of each row of the tables of a page.
fn rows(page: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = page.lines().filter(|line| line.starts_with('|'));
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

/// Contents of the fenced blocks of one language.
pub(crate) fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let after = page.split(fence.as_str()).skip(1);
    after.map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn every_example_row_is_read() {
    let page = text("docs/data-format.md");
    let examples: Vec<&str> =
        blocks(&page, "jsonl").iter().flat_map(|block| block.lines()).collect();
    assert!(examples.len() >= 9, "{} examples", examples.len());
    let (_folder, path) = temporary("examples.jsonl", &examples.join("\n"));
    let image_root = Some(root().join("tests/fixtures/images"));
    let set = DatasetConfig { image_root, ..DatasetConfig::new(path) };
    let model = root().join("data/quickstart/model");
    let encoder = Encoder::from_folder(&model, &ImageConfig::default()).unwrap();
    let data = DatasetRows::open(&[set], Arc::new(encoder)).unwrap();
    for (row, example) in data.rows().zip(&examples) {
        let sample = data.read(row).unwrap_or_else(|rejection| panic!("{rejection}: {example}"));
        let images = example.matches(".png").count() + example.matches(".jpg").count();
        let is_video = example.contains("video");
        assert_eq!(sample.media.len(), if is_video { 1 } else { images }, "{example}");
    }
}

/// A release contains the files that messages of the program name.
#[test]
fn every_file_that_a_message_names_is_in_a_release() {
    let script = text("scripts/release/pack.sh");
    let packed = script.lines().find_map(|line| line.strip_prefix("git ls-files -z ")).unwrap();
    let packed: Vec<&str> = packed.split(" | ").next().unwrap().split(' ').collect();
    let mut sources = Vec::new();
    files(&root().join("src"), ".rs", &mut sources);
    files(&root().join("crates"), ".rs", &mut sources);
    let mut named = 0;
    for path in sources.iter().filter(|path| !path.to_str().unwrap().contains("test")) {
        let source = fs::read_to_string(path).unwrap();
        let product = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for line in product.lines().filter(|line| !line.trim_start().starts_with("//")) {
            let words = line.split(|c: char| !c.is_alphanumeric() && !"/._-".contains(c));
            for word in words.filter(|word| {
                ["docs/", "configs/", "scripts/"].iter().any(|folder| word.starts_with(folder))
            }) {
                let is_packed = packed.iter().any(|part| Path::new(word).starts_with(part));
                let exists = root().join(word.trim_end_matches('.')).exists();
                assert!(is_packed && exists, "{}: a release has no `{word}`", path.display());
                named += 1;
            }
        }
    }
    assert!(named > 5, "{named}");
}

/// The reasons in the attributes `#[fault(..)]` of a source file.
fn reasons(source: &str) -> impl Iterator<Item = &str> {
    let attributes = source.split("#[fault(").skip(1).filter_map(|rest| rest.split(")]").next());
    attributes.filter_map(|attribute| {
        let (_, reason) = attribute.split_once("reason = \"")?;
        reason.split('"').next()
    })
}

#[test]
fn every_reason_of_a_rejection_is_explained() {
    let mut sources = Vec::new();
    files(&root().join("crates/data/src"), ".rs", &mut sources);
    let sources: Vec<String> =
        sources.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut reasons: BTreeSet<&str> = sources.iter().flat_map(|source| reasons(source)).collect();
    assert!(reasons.len() > 20, "{reasons:?}");
    let spaces: Vec<_> = reasons.iter().filter(|reason| reason.contains(' ')).collect();
    assert!(spaces.is_empty(), "not a key: {spaces:?}");
    reasons.retain(|reason| TransientFailure::with_reason(reason).is_none()); // it rejects no row
    reasons.extend(["empty", "overlong", "too_long", "changed"]); // by length, in crates/data/src/loader/
    let page = text("docs/data-format.md");
    let explained: BTreeSet<&str> =
        rows(&page).filter(|row| row.len() == 2).filter_map(|row| code(row[0])).collect();
    let missing: Vec<_> = reasons.symmetric_difference(&explained).collect();
    assert!(missing.is_empty(), "docs/data-format.md and the source differ in {missing:?}");
}

/// All files below a folder whose names end with `ending`.
fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, ending, found);
        } else if path.to_str().unwrap().ends_with(ending) {
            found.push(path);
        }
    }
}

#[test]
fn every_property_of_the_proofs_names_tests_that_exist() {
    let mut sources = Vec::new();
    files(&root().join("src"), ".rs", &mut sources);
    files(&root().join("crates"), ".rs", &mut sources);
    files(&root().join("tests/integration"), ".rs", &mut sources);
    let code: String = sources.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let page = text("docs/dev/proofs.md");
    let names: Vec<&str> = rows(&page)
        .filter(|row| row.len() == 2)
        .flat_map(|row| row[1].split('`').skip(1).step_by(2))
        .collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let exists = if name.contains('/') {
            root().join(name).exists()
        } else {
            code.contains(&format!("fn {name}("))
        };
        assert!(exists, "docs/dev/proofs.md: there is no `{name}`");
    }
}

/// The anchors of a page: each heading in lower case, with `-` for spaces and without punctuation.
fn anchors(page: &str) -> Vec<String> {
    let mut is_code = false;
    let headings = page.lines().filter(|line| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code && line.starts_with('#')
    });
    let anchor = |heading: &str| {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Whether `path`, with at most one `*` in a component, names a file or folder below `folder`.
fn exists_below(folder: &Path, path: &str) -> bool {
    let (first, rest) = path.split_once('/').unwrap_or((path, ""));
    if first.is_empty() {
        return folder.exists();
    }
    let Some((start, end)) = first.split_once('*') else {
        return exists_below(&folder.join(first), rest);
    };
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.map(|entry| entry.unwrap().path()).any(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with(start) && name.ends_with(end) && exists_below(&path, rest)
    })
}

#[test]
fn every_path_of_the_repository_that_a_page_names_exists() {
    let mut pages = ["README.md", "CONTRIBUTING.md"].map(|name| root().join(name)).to_vec();
    files(&root().join("docs"), ".md", &mut pages);
    let mut wrong = Vec::new();
    for page in pages {
        let content = fs::read_to_string(&page).unwrap();
        let mut is_code = false;
        for (index, line) in content.lines().enumerate() {
            is_code ^= line.trim_start().starts_with("```");
            for path in line.split('`').skip(1).step_by(2).filter(|_| !is_code) {
                let below = ["src/", "crates/", "tests/", "scripts/", "configs/", "data/"];
                let is_path = below.iter().any(|folder| path.starts_with(folder))
                    && path.chars().all(|c| c.is_ascii_alphanumeric() || "/_-.*".contains(c));
                // `NAME` in capitals is a placeholder
                let is_placeholder = |part: &str| part.len() > 1 && part == part.to_uppercase();
                let is_named = !path.split(['/', '.']).any(is_placeholder);
                if is_path && is_named && !exists_below(root(), path) {
                    wrong.push(format!("{}:{}: `{path}`", page.display(), index + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "these paths do not exist:\n{}", wrong.join("\n"));
}

#[test]
fn every_link_between_pages_leads_somewhere() {
    let outside = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let mut pages = outside.map(|name| root().join(name)).to_vec();
    files(&root().join("docs"), ".md", &mut pages);
    let summary = text("docs/SUMMARY.md");
    for page in &pages {
        let content = fs::read_to_string(page).unwrap();
        for link in content.split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            if target.contains("://") {
                continue;
            }
            let there = if target.is_empty() { page } else { &page.parent().unwrap().join(target) };
            assert!(there.exists(), "{}: `{target}` does not exist", page.display());
            if !anchor.is_empty()
                && (target.is_empty() || there.extension().is_some_and(|end| end == "md"))
            {
                let found = anchors(&fs::read_to_string(there).unwrap());
                let exists = found.iter().any(|found| found == anchor);
                assert!(exists, "{}: `{link}` is no heading of {found:?}", page.display());
            }
        }
        let name = page.strip_prefix(root()).unwrap().to_str().unwrap();
        let listed = outside.contains(&name) || summary.contains(name.trim_start_matches("docs/"));
        assert!(listed || name == "docs/SUMMARY.md", "docs/SUMMARY.md lacks {name}");
    }
}

#[test]
fn the_slurm_script_is_a_script_whose_options_are_those_of_sbatch() {
    let page = text("docs/distributed.md");
    let scripts = blocks(&page, "text");
    let script = scripts.iter().find(|script| script.starts_with("#!/bin/bash\n")).unwrap();
    let (_folder, path) = temporary("sft.sh", script);
    let checked = Command::new("bash").arg("-n").arg(&path).output().unwrap();
    assert!(checked.status.success() && checked.stderr.is_empty(), "{checked:?}");
    let known = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal requeue";
    let known: BTreeSet<&str> = known.split(' ').collect();
    let options = script.lines().filter_map(|line| line.strip_prefix("#SBATCH --"));
    let options: BTreeSet<&str> = options.map(|option| option.split('=').next().unwrap()).collect();
    assert_eq!(options, known);
    // after the first command, sbatch ignores options
    let first = script.lines().position(|line| line.starts_with("export ")).unwrap();
    assert!(script.lines().skip(first).all(|line| !line.starts_with("#SBATCH")));
}

#[test]
fn the_kubernetes_manifest_gives_each_pod_its_place_among_the_ranks() {
    let page = text("docs/distributed.md");
    let manifests = blocks(&page, "yaml");
    let manifest = manifests.iter().find(|text| text.contains("kind: Job")).unwrap();
    let parse = |text: &str| serde_saphyr::from_str::<Value>(text).unwrap();
    let documents: Vec<Value> = manifest.split("\n---\n").map(parse).collect();
    let [service, job] = &documents[..] else { panic!("{} documents", documents.len()) };
    let name = |of: &Value| of["metadata"]["name"].as_str().unwrap().to_owned();
    assert_eq!([&service["kind"], &job["kind"]], ["Service", "Job"]);
    assert_eq!(service["spec"]["clusterIP"], "None");
    assert_eq!(service["spec"]["selector"]["job-name"], name(job));
    let (spec, pod) = (&job["spec"], &job["spec"]["template"]["spec"]);
    assert_eq!(spec["completionMode"], "Indexed");
    assert_eq!(spec["completions"], spec["parallelism"], "all pods run at the same time");
    assert_eq!(pod["subdomain"], name(service));
    let container = &pod["containers"][0];
    let variables: BTreeMap<&str, &Value> = container["env"]
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| (variable["name"].as_str().unwrap(), variable))
        .collect();
    let index = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
    assert_eq!(variables["RANK"]["valueFrom"]["fieldRef"]["fieldPath"], index);
    // the place of the pod with index 3
    let lookup = |name: &str| match (name, variables.get(name)?) {
        ("RANK", _) => Some("3".to_owned()),
        (_, variable) => variable["value"].as_str().map(str::to_owned),
    };
    let place = Launched::find(lookup).unwrap().unwrap();
    assert_eq!((place.rank as u64, place.world as u64), (3, spec["completions"].as_u64().unwrap()));
    let first = format!("{}-0.{}", name(job), name(service));
    assert_eq!(place.host.as_deref(), Some(first.as_str()));
    assert!(place.port.is_some() && !place.job.is_empty());
    let volumes = pod["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]);
    let mounts = container["volumeMounts"].as_array().unwrap().iter().map(|mount| &mount["name"]);
    assert_eq!(mounts.collect::<Vec<_>>(), volumes.collect::<Vec<_>>());
}
