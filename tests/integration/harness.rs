//! Runs the binary in a temporary folder, with a tiny model and rows from `tests/golden`.

use candle_core::{DType, Device, Tensor, safetensors};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config as ProptestConfig, RngSeed, TestCaseError, TestRunner};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Result of a finished command.
#[derive(Debug)]
pub(crate) struct Output {
    /// Exit code, or -1 if a signal ended the command.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Panics with the whole output unless the exit code is `code`.
    #[track_caller]
    pub(crate) fn ends_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Panics unless stderr contains `text`.
    #[track_caller]
    pub(crate) fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "no `{text}` in:\n{}", self.stderr);
        self
    }
}

/// The config value of [`device`].
pub(crate) fn device_name() -> String {
    std::env::var("TRAINER_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned())
}

/// The device of tests in this process: `TRAINER_TEST_DEVICE`, or the CPU if it is not set.
pub(crate) fn device() -> candle_core::Device {
    static DEVICE: std::sync::LazyLock<candle_core::Device> = std::sync::LazyLock::new(|| {
        device_name().parse::<trainer::train::DeviceChoice>().unwrap().open().unwrap()
    });
    DEVICE.clone()
}

/// Whether all cases of the tests run (`TRAINER_LONG_TESTS=1`, as in `scripts/long.sh`), or some.
pub(crate) fn is_long() -> bool {
    std::env::var_os("TRAINER_LONG_TESTS").is_some()
}

/// The cases that run: all if [`is_long`], otherwise the first, the middle and the last one.
pub(crate) fn some_of<T: Copy>(all: &[T]) -> Vec<T> {
    match all {
        [first, .., last] if !is_long() && all.len() > 3 => vec![*first, all[all.len() / 2], *last],
        _ => all.to_vec(),
    }
}

/// The binary that tests run: that of this build, or `TRAINER_TEST_BINARY`, which `.ci/run` sets to the
/// one with the default features.
pub(crate) fn binary() -> String {
    let built = || env!("CARGO_BIN_EXE_trainer").to_owned();
    std::env::var("TRAINER_TEST_BINARY").unwrap_or_else(|_| built())
}

/// Checks a property with `cases` random values. A failure prints how to repeat it.
#[track_caller]
pub(crate) fn property<S: Strategy>(
    cases: u32,
    values: &S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let mut config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => rand::random(),
    };
    config.rng_seed = RngSeed::Fixed(seed);
    if let Err(error) = TestRunner::new(config).run(values, check) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let again =
            format!("PROPTEST_RNG_SEED={seed} cargo test --release --test integration {name}");
        panic!("{error}\nto repeat: {again}");
    }
}

/// Path of a file in `tests/golden`.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A temporary folder in which commands run; removed at the end of the test.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    pub(crate) fn empty() -> Self {
        Self { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    /// A folder with a model in `model` and image and text rows in `rows.jsonl`, some of them
    /// unusable.
    pub(crate) fn with_model_and_rows() -> Self {
        let place = Self::empty();
        place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
        let lines = |name: &str| fs::read_to_string(golden(name)).unwrap();
        let (images, text) = (lines("data/image_exact.jsonl"), lines("data/text.jsonl"));
        let mut rows: Vec<&str> = images.lines().take(18).collect();
        rows.extend(text.lines().filter(|line| line.len() < 420).take(14));
        let overlong = text.lines().max_by_key(|line| line.len()).unwrap();
        rows.insert(20, overlong);
        rows.insert(12, r#"{"messages":[{"role":"user","content":"no answer"}]}"#);
        rows.insert(9, r#"{"messages": not JSON"#);
        rows.insert(
            3,
            r#"{"messages":[{"role":"user","content":"<image>?"},{"role":"assistant","content":"."}],"images":["none.png"]}"#,
        );
        place.write("rows.jsonl", &(rows.join("\n") + "\n"));
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        write(&self.path(name), text.as_bytes());
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        let path = self.path(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Parses a JSONL file.
    pub(crate) fn rows(&self, name: &str) -> Vec<Value> {
        json_lines(&String::from_utf8(self.read(name)).unwrap())
    }

    /// Sorted names of the entries of a folder.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A command that runs the binary in this folder, without the logging, thread and proxy
    /// variables of the test's environment. It makes no request to the hub.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env_remove("RAYON_NUM_THREADS").env_remove("TRAINER_SIMD");
        command.env_remove("CLICOLOR_FORCE").env_remove("CLICOLOR").env_remove("NO_COLOR");
        command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.path("hf")).env_remove("HF_TOKEN");
        command.env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN_PATH").env_remove("HF_ENDPOINT");
        for name in ["http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(name).env_remove(name.to_uppercase());
        }
        command
    }

    pub(crate) fn trainer(&self, arguments: &[&str]) -> Output {
        finish(&mut self.command(arguments))
    }

    /// Starts a command that the test will stop, without output.
    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// Runs a command and waits until it ends.
pub(crate) fn finish(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    Output {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Keys of metrics that differ between equal runs: times and memory. A resumed run does not count its
/// packs again, so its prediction differs.
const MEASURED: [&str; 10] = [
    "step_time_s",
    "data_wait_s",
    "save_hold_s",
    "save_s",
    "tokens_per_s",
    "peak_memory_bytes",
    "peak_device_memory_bytes",
    "peak_device_reserved_bytes",
    "predicted_memory_bytes",
    "time_s",
];

/// Removes the keys of metrics that differ between equal runs.
pub(crate) fn without_measured(mut rows: Vec<Value>) -> Vec<Value> {
    for object in rows.iter_mut().filter_map(Value::as_object_mut) {
        for key in MEASURED {
            object.remove(key);
        }
    }
    rows
}

/// Parses each line as JSON.
pub(crate) fn json_lines(text: &str) -> Vec<Value> {
    let row =
        |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(row).collect()
}

/// Writes a file without the guarantees of `write_atomically`, which tests do not need.
pub(crate) fn write(path: &Path, bytes: &[u8]) {
    use std::io::Write as _;
    fs::File::create(path).unwrap().write_all(bytes).unwrap();
}

/// Copies a folder recursively.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The tensors of a safetensors file.
pub(crate) fn tensors(place: &Place, file: &str) -> HashMap<String, Tensor> {
    safetensors::load(place.path(file), &Device::Cpu).unwrap()
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Writes the adapter `peft` of rank 1 for the projection `up_proj` of `layer`, whose weight is
/// `[outputs, inputs]`: all of its values are 1.
pub(crate) fn write_adapter(place: &Place, layer: &str, (outputs, inputs): (usize, usize)) {
    let factors = [("lora_A", (1, inputs)), ("lora_B", (outputs, 1))].map(|(name, shape)| {
        let ones = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        (format!("base_model.model.{layer}.{name}.weight"), ones)
    });
    fs::create_dir(place.path("peft")).unwrap();
    safetensors::save(&HashMap::from(factors), place.path("peft/adapter_model.safetensors"))
        .unwrap();
    let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"]}"#;
    place.write("peft/adapter_config.json", config);
}

/// Dtype and bits of each tensor.
pub(crate) fn bits(tensors: &HashMap<String, Tensor>) -> BTreeMap<&str, (DType, Vec<u32>)> {
    let bits = |tensor: &Tensor| values(tensor).into_iter().map(f32::to_bits).collect();
    tensors.iter().map(|(name, tensor)| (name.as_str(), (tensor.dtype(), bits(tensor)))).collect()
}
