//! `trainer completions` and `trainer man`: the arguments of all commands, for shells and `man`.

use super::Cli;
use super::failure::{Exit, Failure};
use super::terminal::stdout;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write as _;
use std::path::PathBuf;

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainer completions bash > ~/.local/share/bash-completion/completions/trainer\n  \
    trainer completions zsh > ~/.zfunc/_trainer\n  \
    trainer completions fish > ~/.config/fish/completions/trainer.fish")]
pub(super) struct CompletionsArgs {
    /// The shell that reads the script
    shell: Shell,
}

pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "trainer", &mut script);
    Ok(stdout().write_all(&script)?)
}

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer man --out ~/.local/share/man/man1")]
pub(super) struct ManArgs {
    /// Folder to write: `trainer.1`, and a page for each command
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(super) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let out = &args.out;
    let written =
        std::fs::create_dir_all(out).and_then(|()| clap_mangen::generate_to(Cli::command(), out));
    written.map_err(|error| {
        let message = format!("cannot write the pages to `{}`: {error}", out.display());
        Failure::new(Exit::CannotWrite, message).hint("choose another `--out`")
    })?;
    tracing::info!(folder = %out.display(), "wrote the man pages");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_completions_of_each_shell_have_each_command() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell, Shell::Elvish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "trainer", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in Cli::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }

    #[test]
    fn each_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        man(&ManArgs { out: folder.path().join("man1") }).unwrap();
        for command in Cli::command().get_subcommands() {
            let page = folder.path().join(format!("man1/trainer-{}.1", command.get_name()));
            let text = std::fs::read_to_string(&page).unwrap();
            assert!(text.contains(".SH SYNOPSIS"), "{}", page.display());
        }
    }
}
