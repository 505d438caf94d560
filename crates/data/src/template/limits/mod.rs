//! An engine whose time, memory and depth of recursion are bounded for every template.
//!
//! The engine counts instructions. Filters, methods and tests count the sizes of what they read and
//! return, and the [source](source) is changed so that operators do, too. A template that exceeds
//! the budget of a conversation fails with its line.

mod filters;
mod source;
#[cfg(test)]
mod tests;

use std::io::{self, Write};

use minijinja::{Environment, Error, ErrorKind, Value};

/// Instructions of a rendering without messages.
const BASE_STEPS: u64 = 2_000_000;
/// Instructions of the template per message.
const STEPS_PER_MESSAGE: u64 = 2_000;

/// Adds counting versions of everything that a template can call.
pub(super) fn limit(env: &mut Environment<'static>) {
    filters::add(env);
    env.set_unknown_method_callback(filters::method);
    env.set_formatter(|out, state, value| {
        filters::count_all(value)?;
        minijinja::escape_formatter(out, state, value)
    });
    for name in ["debug", "dict", "namespace"] {
        let made = env.globals().find(|(other, _)| *other == name).map(|(_, value)| value);
        env.remove_global(name);
        if let Some(made) = made.filter(|_| name != "debug") {
            filters::add_maker(env, name, made);
        }
    }
}

/// Adds a template whose operators count; an error of the source has its line.
pub(super) fn add_template(
    env: &mut Environment<'static>,
    name: &'static str,
    text: &str,
) -> Result<(), String> {
    let counting = source::with_counters(text)
        .map_err(|error| format!("{} (line {})", error.what, error.line))?;
    env.add_template_owned(name, counting).map_err(|error| describe(&error))
}

/// Renders a template for a conversation of `num_messages` messages of `bytes` together.
pub(super) fn render(
    env: &Environment<'static>,
    name: &str,
    context: Value,
    [num_messages, bytes]: [usize; 2],
) -> Result<String, String> {
    let steps = BASE_STEPS + STEPS_PER_MESSAGE * num_messages as u64 + bytes as u64;
    let mut env = env.clone(); // shares the compiled template
    env.set_fuel(Some(steps));
    let template = env.get_template(name).map_err(|error| describe(&error))?;
    filters::start(bytes);
    let mut out = Limited { bytes: Vec::new(), left: filters::budget(bytes) };
    match template.render_captured_to(context, &mut out) {
        Ok(_) => String::from_utf8(out.bytes).map_err(|error| error.to_string()),
        Err(error) if error.kind() == ErrorKind::OutOfFuel => {
            let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
            Err(format!("it runs more than {steps} instructions{line}"))
        }
        Err(error) if error.kind() == ErrorKind::WriteFailure => {
            Err("it writes more text than a conversation of this size needs".to_owned())
        }
        Err(error) => Err(describe(&error)),
    }
}

/// Counts a JSON text before it is made.
pub(super) fn count_json(value: &Value, indent: Option<usize>) -> Result<(), Error> {
    if indent.is_some_and(|indent| indent > 64) {
        return Err(Error::new(ErrorKind::InvalidOperation, "`indent` must be at most 64"));
    }
    filters::count_all(value)?;
    filters::count_all(value) // the text that is made of it
}

/// Formats an error in one line, with its line in the template.
fn describe(error: &Error) -> String {
    const SHOWN: usize = 300;
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let mut shown: String = what.chars().take(SHOWN).collect();
    if shown.len() < what.len() {
        shown.push_str("..");
    }
    error.line().map_or_else(|| shown.clone(), |line| format!("{shown} (line {line})"))
}

/// The rendered text, up to a number of bytes.
struct Limited {
    bytes: Vec<u8>,
    left: u64,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self
            .left
            .checked_sub(bytes.len() as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
