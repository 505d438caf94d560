//! Only one run uses an `output_dir` at a time, and files of earlier runs are kept. Also errors of
//! stdout.

use super::harness::{Place, finish, golden};
use std::fs::File;
use std::io::Read as _;
use std::process::Stdio;

/// A finished run on text rows in `run`: three steps with a checkpoint after each.
fn finished() -> Place {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    let rows = golden("data/text.jsonl").display().to_string();
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndata: {{train: [{{path: '{rows}'}}], packing_length: 512, max_rejected: 1.0}}\n\
             train: {{max_steps: 3}}\ncheckpoint: {{every_steps: 1, keep: 10}}\n"
        ),
    );
    place.trainer(&SFT).ends_with(0);
    place
}

const SFT: [&str; 3] = ["sft", "--config", "config.yaml"];

fn sft<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SFT[..], more].concat()
}

#[test]
fn a_second_run_in_the_same_folder_is_rejected_while_the_first_is_running() {
    let place = finished();
    let weights = place.read("run/final/model.safetensors");
    // A running process holds this lock.
    let folder = File::open(place.path("run")).unwrap();
    folder.try_lock().unwrap();
    for more in [&[][..], &["--resume", "never"], &["--set", "optim.lr=1e-3"]] {
        let refused = place.trainer(&sft(more)).ends_with(64);
        refused.says("another run is using `run`").says("hint: wait for it");
    }
    assert!(!place.path("run/previous-1").exists());
    assert!(place.read("run/final/model.safetensors") == weights);
    // The system releases the lock when the process ends, for whatever reason.
    drop(folder);
    place.trainer(&SFT).ends_with(0).says("all steps of this run are done");
}

#[test]
fn a_model_inside_output_dir_is_rejected_and_stays() {
    let place = finished();
    for model in ["run/final", "run/checkpoints/step-00000002", "model/../run/final"] {
        let path = format!("model.path={model}");
        let refused = place.trainer(&sft(&["--set", &path, "--resume", "never"])).ends_with(64);
        refused.says("`model.path` is in `output_dir` `run`").says("hint: set another");
    }
    assert!(!place.path("run/previous-1").exists());
    let elsewhere = sft(&["--set", "model.path=run/final", "--set", "output_dir=next"]);
    place.trainer(&elsewhere).ends_with(0).says("start from_step=0");
    assert!(place.path("run/final/model.safetensors").is_file());
}

/// A process that was killed before it moved files leaves it behind.
#[test]
fn an_empty_folder_for_earlier_files_is_removed_at_the_next_start() {
    let place = finished();
    for name in ["run/previous-1", "run/previous-7"] {
        std::fs::create_dir(place.path(name)).unwrap();
    }
    std::fs::create_dir_all(place.path("run/previous-3/checkpoints")).unwrap();
    place.trainer(&SFT).ends_with(0);
    let names = place.names("run");
    let left: Vec<&String> = names.iter().filter(|name| name.starts_with("previous")).collect();
    assert_eq!(left, ["previous-3"]);
}

#[test]
fn resuming_from_an_older_checkpoint_moves_the_later_ones_aside() {
    let place = finished();
    let later = ["step-00000002", "step-00000003"];
    let old = later.map(|name| place.read(&format!("run/checkpoints/{name}/model.safetensors")));
    let from = sft(&["--resume", "run/checkpoints/step-00000001", "--set", "train.max_steps=2"]);
    let run = place.trainer(&from).ends_with(0).says("resume from_step=1 steps=2");
    run.says("moved the checkpoints of later steps").says("later=[2, 3]");
    assert_eq!(place.names("run/previous-1"), later);
    for (name, old) in later.iter().zip(old) {
        assert!(place.read(&format!("run/previous-1/{name}/model.safetensors")) == old, "{name}");
    }
    assert_eq!(place.names("run/checkpoints"), ["step-00000001", "step-00000002"]);
    // Without later checkpoints nothing is moved.
    let newest = sft(&["--resume", "run/checkpoints/step-00000002"]);
    place.trainer(&newest).ends_with(0).says("resume from_step=2");
    assert!(!place.path("run/previous-2").exists());
}

#[test]
fn tokenizer_files_deleted_during_a_run_are_still_in_its_checkpoints() {
    let place = finished();
    let copied = ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json"];
    let wanted = copied.map(|name| place.read(&format!("model/{name}")));
    // A run reads the files of the model folder at its start.
    let mut child = place.start(&sft(&["--resume", "never", "--set", "train.max_steps=30"]));
    let first = place.path("run/checkpoints/step-00000001");
    let aside = place.path("run/previous-1");
    while !(aside.exists() && first.exists()) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended early");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for name in copied {
        std::fs::remove_file(place.path(&format!("model/{name}"))).unwrap();
    }
    assert!(child.wait().unwrap().success());
    for (name, wanted) in copied.iter().zip(wanted) {
        assert!(place.read(&format!("run/final/{name}")) == wanted, "{name}");
    }
}

#[test]
fn closing_stdout_early_ends_a_command_without_an_error_message() {
    let place = finished();
    let mut command = place.command(&["inspect", "--config", "config.yaml", "--num", "0"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap(); // dropping stdout closes the pipe
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(141), "{said}");
    assert!(!said.contains("error") && !said.contains("panic"), "{said}");
}

#[test]
fn a_full_disk_under_stdout_is_reported() {
    let place = finished();
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: this system has no /dev/full");
        return;
    };
    for arguments in [
        &["inspect", "--config", "config.yaml", "--num", "1"][..],
        &["generate", "--model", "run/final", "--prompt", "x", "--max-new-tokens", "1"],
        &["--help"],
    ] {
        let mut command = place.command(arguments);
        let output = finish(command.stdout(full.try_clone().unwrap())).ends_with(73);
        output.says("error: cannot write to stdout").says("caused by: ").says("hint: free space");
    }
}

#[test]
fn the_config_of_a_run_is_read_again_with_the_same_paths() {
    let place = finished();
    std::fs::rename(place.path("model"), place.path("mod$el")).unwrap();
    let rows = place.path("~rows.jsonl");
    std::fs::copy(golden("data/text.jsonl"), rows).unwrap();
    let set = ["output_dir=r$$UN", "model.path=mod$$el", "data.train.0.path=./~rows.jsonl"];
    let set: Vec<&str> = set.iter().flat_map(|setting| ["--set", *setting]).collect();
    place.trainer(&sft(&set)).ends_with(0).says("start from_step=0");
    let stored = ["sft", "--config", "r$$UN/config.yaml"];
    place.trainer(&stored).ends_with(0).says("all steps of this run are done");
    // a new run: only what was changed is named
    let changed = place.trainer(&[&stored[..], &["--set", "optim.lr=1e-4"]].concat()).ends_with(0);
    assert_eq!(changed.stderr.matches("a setting differs").count(), 1, "{}", changed.stderr);
}

#[test]
fn folders_that_killed_commands_have_left_are_removed() {
    let place = finished();
    let own = format!("run/.trainer-{}-0", std::process::id());
    for name in ["run/.trainer-4194305-0", &own] {
        // above the maximum process id of Linux; a process that runs
        std::fs::create_dir_all(place.path(name).join("cache")).unwrap();
    }
    place.trainer(&SFT).ends_with(0);
    assert!(!place.path("run/.trainer-4194305-0").exists());
    assert!(place.path(&own).exists());
}
