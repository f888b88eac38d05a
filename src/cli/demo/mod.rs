//! `kvfs demo`: what a mount is good for, shown on one that is made for it and goes again. Every figure that it prints
//! was measured in that run; a model that has learned nothing does the computing.

mod pages;
mod sandbox;
mod story;
mod toy;

use std::io::{self, BufRead, IsTerminal};

use super::output::{Failure, Outcome, Report};
use sandbox::{Sandbox, turn};
use story::Story;

/// Shows everything, and on a terminal keeps the mount until Enter is pressed.
pub(crate) fn run() -> Outcome {
    let sandbox = Sandbox::new().map_err(Failure::Failed)?;
    let told = Story::new(&sandbox).tell().and_then(|()| {
        if io::stdin().is_terminal() && io::stdout().is_terminal() {
            wait_for_enter(&sandbox)?;
        }
        Ok(())
    });
    drop(sandbox);
    // If a signal has taken the mount away, that is no failure.
    let _turn = turn();
    told.map_err(Failure::Failed)?;
    Ok(Report::text("The mount and everything in it are removed.\n".to_owned()))
}

fn wait_for_enter(sandbox: &Sandbox) -> Result<(), String> {
    story::say(&format!(
        "The mount stays until Enter is pressed. Meanwhile, in another terminal:\n\n  \
         cd {}\n  ls -lR mnt/models\n  python3   # and the lines from the README",
        sandbox.directory().display()
    ))?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).map_err(|error| format!("the terminal: {error}"))?;
    Ok(())
}
