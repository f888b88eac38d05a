//! Man pages, and what makes shells complete arguments: both follow from the arguments that the program
//! takes, so they say what this version does.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::arguments::Arguments;
use super::output::{Failure, Outcome, Report};

/// `kvfs completions`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs completions bash > /etc/bash_completion.d/kvfs")]
pub(crate) struct CompletionsArguments {
    /// Which shell reads it
    pub shell: Shell,
}

/// `kvfs man`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs man /usr/local/share/man/man1")]
pub(crate) struct ManArguments {
    /// Where to: kvfs.1, kvfs-mount.1 and so on; it is made if it is missing
    pub directory: PathBuf,
}

/// Prints the completions of a shell.
pub(crate) fn completions(arguments: &CompletionsArguments) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "kvfs", &mut script);
    Ok(Report::text(String::from_utf8(script).map_err(Failure::failed)?))
}

/// Writes a man page for the program and for each of its commands.
pub(crate) fn write(arguments: &ManArguments) -> Outcome {
    let directory = &arguments.directory;
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Arguments::command(), directory))
        .map_err(|error| Failure::Failed(format!("{}: {error}", directory.display())))?;
    Ok(Report::default())
}
