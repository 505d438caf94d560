//! `trainer`: supervised fine-tuning of vision-language models, in one binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    trainer::cli::main()
}
