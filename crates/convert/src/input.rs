//! Reads the files of another trainer into a list of settings.

use crate::error::ConvertError;
use crate::shell::{Command, Word, commands};
use crate::tables;
use crate::trainer::Trainer;
use crate::value::{Origin, Setting, Value};
use settings::{Node, Value as NodeValue, parse_file, parse_text};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The settings of all files; of several values of one key, the last.
#[derive(Debug, Default)]
pub(crate) struct Input {
    pub(crate) settings: Vec<Setting>,
    /// Settings whose values depend on something outside of the files: key, place, variable.
    pub(crate) unknown: Vec<(String, Origin, String)>,
    /// Whether one of the files is a script; only scripts set environment variables.
    pub(crate) has_script: bool,
}

/// Reads `files` in order.
pub(crate) fn read(trainer: Trainer, files: &[PathBuf]) -> Result<Input, ConvertError> {
    let mut input = Input::default();
    for file in files {
        let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if matches!(ending.to_ascii_lowercase().as_str(), "yaml" | "yml" | "json") {
            input.tree(trainer, file)?;
        } else {
            input.script(trainer, file)?;
        }
    }
    let mut later = HashSet::new();
    input.settings.reverse();
    input.settings.retain(|setting| later.insert(setting.key.clone()));
    input.settings.reverse();
    Ok(input)
}

impl Input {
    fn add(&mut self, key: String, value: Value, origin: Origin) {
        self.settings.push(Setting { key, value, origin });
    }

    /// Reads a YAML or JSON file.
    fn tree(&mut self, trainer: Trainer, path: &Path) -> Result<(), ConvertError> {
        let mut root = &parse_file(path)?;
        // lmms-engine also reads a list of components: `- {type: trainer, config: {..}}`
        if let NodeValue::List(items) = &root.value
            && let [item] = items.as_slice()
            && trainer == Trainer::LmmsEngine
        {
            root = item.nearest(&["config"]);
        }
        let file: Arc<str> = path.display().to_string().into();
        let NodeValue::Map(_) = &root.value else {
            return Err(ConvertError::NotSettings { path: path.to_owned() });
        };
        self.entries(trainer, "", root, &file);
        Ok(())
    }

    /// Adds the entries of a mapping; sections are followed down to the keys of the table.
    fn entries(&mut self, trainer: Trainer, section: &str, node: &Node, file: &Arc<str>) {
        let NodeValue::Map(entries) = &node.value else { return };
        for entry in entries {
            let key = tables::normal(trainer, &format!("{section}{}", entry.key));
            let has_entries =
                matches!(&entry.node.value, NodeValue::Map(inner) if !inner.is_empty());
            let is_known = tables::row_of(trainer, &key).is_some();
            if has_entries && (!is_known || tables::is_section(trainer, &key)) {
                self.entries(trainer, &format!("{key}."), &entry.node, file);
                continue;
            }
            let line = entry.key_place.position().map_or(0, |(line, _)| line);
            self.add(key, Value::of(&entry.node), Origin::File(Arc::clone(file), line));
        }
    }

    /// Reads a launch script, or a file with the arguments alone.
    fn script(&mut self, trainer: Trainer, path: &Path) -> Result<(), ConvertError> {
        let text = files::read_to_string(path)
            .map_err(|source| ConvertError::Read { path: path.to_owned(), source })?;
        let file: Arc<str> = path.display().to_string().into();
        let (mut found, mut arguments) = (None, Command::default());
        let is_argument = |words: &[Word]| words[0].text.starts_with("--");
        let is_wanted = |words: &[Word]| launch(trainer, words).is_some() || is_argument(words);
        for command in commands(&text, is_wanted) {
            match launch(trainer, &command.words) {
                Some(start) if found.is_none() => found = Some((command, start)),
                Some(_) => return Err(ConvertError::TwoCommands { path: path.to_owned() }),
                None => arguments.words.extend(command.words), // a file with one argument a line
            }
        }
        if let (Some(_), Some(word)) = (&found, arguments.words.first()) {
            let (line, word) = (word.line, word.text.clone());
            return Err(ConvertError::OutsideCommand { path: path.to_owned(), line, word });
        }
        let found =
            found.or(Some((arguments, 0)).filter(|(arguments, _)| !arguments.words.is_empty()));
        let Some((Command { env, words }, start)) = found else {
            let expected = trainer.command();
            return Err(ConvertError::NoCommand { path: path.to_owned(), expected });
        };
        self.has_script = true;
        for (name, value) in env {
            let place = Origin::File(Arc::clone(&file), value.line);
            self.word(name, vec![value], place);
        }
        let (launcher, words) = words.split_at(start);
        for (key, mut values, line) in options(launcher).0 {
            values.truncate(1); // the next words are the program
            let key = key.replace('-', "_");
            let env = match key.as_str() {
                "nproc_per_node" | "num_gpus" | "num_processes" => "NPROC_PER_NODE",
                "nnodes" | "num_nodes" => "NNODES",
                _ => continue,
            };
            self.word(env.to_owned(), values, Origin::File(Arc::clone(&file), line));
        }
        let (options, positional) = options(words);
        for file in positional {
            self.tree(trainer, &sibling(path, &file.text))?;
        }
        for (key, values, line) in options {
            let is_file = match trainer {
                Trainer::MsSwift => key == "config",
                Trainer::LlamaFactory => false,
                Trainer::LmmsEngine => key == "config_yaml",
            };
            if is_file && let [value] = values.as_slice() {
                self.tree(trainer, &sibling(path, &value.text))?;
                continue;
            }
            self.word(tables::normal(trainer, &key), values, Origin::File(Arc::clone(&file), line));
        }
        Ok(())
    }

    /// Adds an argument of a command: no word (a switch), one, or a list.
    fn word(&mut self, key: String, mut words: Vec<Word>, origin: Origin) {
        if let Some(unknown) = words.iter_mut().find_map(|word| word.unknown.take()) {
            self.unknown.push((key, origin, unknown));
            return;
        }
        let mut values = words.into_iter().map(|Word { text, .. }| structured(text));
        let value = match (values.next(), values.next()) {
            (None, _) => Value::Text("true".to_owned()),
            (Some(value), None) => value,
            (Some(first), Some(second)) => {
                Value::List([first, second].into_iter().chain(values).collect())
            }
        };
        self.add(key, value, origin);
    }
}

/// A word that is a JSON list or object, as its value.
fn structured(text: String) -> Value {
    if text.starts_with(['{', '['])
        && let Ok(node) = parse_text(Path::new(""), &text)
    {
        return Value::of(&node);
    }
    Value::Text(text)
}

/// The path of a file that a script names: from the working folder, or from the script's folder.
fn sibling(script: &Path, file: &str) -> PathBuf {
    let path = PathBuf::from(file);
    if path.exists() {
        return path;
    }
    let sibling = script.parent().unwrap_or(Path::new("")).join(&path);
    if sibling.exists() { sibling } else { path }
}

/// The index of the first argument of the training command.
fn launch(trainer: Trainer, words: &[Word]) -> Option<usize> {
    let text = |at: usize| words.get(at).map_or("", |word| word.text.as_str());
    (0..words.len()).find_map(|at| {
        let word = text(at);
        let name = word.rsplit('/').next().unwrap_or(word);
        match trainer {
            Trainer::MsSwift => match name {
                "swift" if text(at + 1) == "sft" => Some(at + 2),
                "sft.py" => Some(at + 1),
                _ => None,
            },
            Trainer::LlamaFactory => match name {
                "llamafactory-cli" | "lmf" if text(at + 1) == "train" => Some(at + 2),
                "train.py" | "train_bash.py" => Some(at + 1),
                _ => None,
            },
            Trainer::LmmsEngine => (word == "lmms_engine.launch.cli").then_some(at + 1),
        }
    })
}

/// An option, its values and its line.
type Argument = (String, Vec<Word>, usize);

/// `--key value ..`, `--key=value` and `key=value`; and the words that are none of these.
fn options(words: &[Word]) -> (Vec<Argument>, Vec<Word>) {
    let (mut options, mut positional): (Vec<Argument>, _) = (Vec::new(), Vec::new());
    let mut takes_values = false;
    for word in words {
        let option = word.text.strip_prefix("--");
        let assigned = option.unwrap_or(&word.text).split_once('=');
        match (option, assigned) {
            (_, Some((key, value)))
                if option.is_some() || (!takes_values && !key.contains(['/', ' '])) =>
            {
                let value = Word { text: value.to_owned(), ..word.clone() };
                options.push((key.to_owned(), vec![value], word.line));
                takes_values = false;
            }
            (Some(key), _) => {
                options.push((key.to_owned(), Vec::new(), word.line));
                takes_values = true;
            }
            (None, _) => match options.last_mut().filter(|_| takes_values) {
                Some((_, values, _)) => values.push(word.clone()),
                None => positional.push(word.clone()),
            },
        }
    }
    (options, positional)
}
