//! Every recipe runs: `trainer check` accepts it, and two steps train it, with a small model and the
//! rows of docs/recipes.md in place of the published model and the user's files.

use super::docs::blocks;
use super::harness::{Place, golden};
use std::fs;
use std::path::{Path, PathBuf};

/// Number of copies of the row of a recipe in its data files.
const COPIES: usize = 4;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Names of the files in configs/recipes, sorted.
fn recipes() -> Vec<String> {
    let entries = fs::read_dir(root().join("configs/recipes")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The row in the section of docs/recipes.md that links to the recipe.
fn row(page: &str, recipe: &str) -> String {
    let link = format!("](../configs/recipes/{recipe})");
    let section = page
        .split("\n## ")
        .find(|section| section.contains(&link))
        .unwrap_or_else(|| panic!("docs/recipes.md does not link to {recipe}"));
    let rows = blocks(section, "jsonl");
    (*rows.first().unwrap_or_else(|| panic!("{recipe} has no example row"))).to_owned()
}

/// A model of the family whose chat template renders what the recipe needs.
fn model(recipe: &str) -> PathBuf {
    // Its template renders thoughts, as those of thinking models do.
    golden(if recipe == "tools.yaml" { "models/small-qwen35" } else { "models/small-tied" })
}

#[test]
fn every_recipe_passes_the_check_and_trains_in_small() {
    let page = fs::read_to_string(root().join("docs/recipes.md")).unwrap();
    let names = recipes();
    assert!(names.len() >= 6, "{names:?}");
    for name in names {
        let place = Place::empty();
        place.write("rows.jsonl", &row(&page, &name).repeat(COPIES));
        let config = root().join("configs/recipes").join(&name);
        let text = fs::read_to_string(&config).unwrap();
        let images = root().join("tests/fixtures/images");
        let data = format!("[{{path: rows.jsonl, image_root: '{}'}}]", images.display());
        let mut settings = vec![
            "output_dir=run".to_owned(),
            "device=cpu".to_owned(),
            format!("model.path={}", model(&name).display()),
            format!("data.train={data}"),
            "data.workers=2".to_owned(),
            "train.max_steps=2".to_owned(),
            "train.epochs=null".to_owned(),
        ];
        if text.contains("\n  eval:") {
            settings.push(format!("data.eval={data}"));
        }
        if text.contains("generate:") {
            settings.push("eval.generate.max_new_tokens=4".to_owned());
        }
        let run = |command: &str| {
            let config = config.to_str().unwrap();
            let mut arguments = vec![command, "--config", config];
            arguments.extend(settings.iter().flat_map(|setting| ["--set", setting.as_str()]));
            println!("{name}: trainer {command}");
            place.trainer(&arguments).ends_with(0);
        };
        run("check");
        run("sft");
        let rows = place.rows("run/metrics.jsonl");
        assert_eq!(rows.len(), 2, "{name}");
        for row in &rows {
            let loss = row["loss"].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
            assert!(loss.is_finite() && loss > 0.0, "{name}: the loss is {loss}");
            assert!(row["rejected"] == 0, "{name}: {row}");
        }
        assert!(place.path("run/final").is_dir(), "{name}");
    }
}
