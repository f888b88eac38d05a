//! What the demo says.

use std::fmt::Display;
use std::io::{self, StdoutLock, Write};

use crate::Result;

/// Standard output, one line at a time.
#[derive(Debug)]
pub(crate) struct Printer {
    out: StdoutLock<'static>,
    step: &'static str,
    steps: usize,
}

impl Printer {
    pub(crate) fn new() -> Self {
        Self { out: io::stdout().lock(), step: "start", steps: 0 }
    }

    /// A line of its own.
    pub(crate) fn say(&mut self, text: impl Display) -> Result<()> {
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    /// A new step begins.
    pub(crate) fn begin(&mut self, step: &'static str) -> Result<()> {
        self.step = step;
        self.steps += 1;
        crate::interrupt::check()?;
        let number = self.steps;
        self.say(format_args!("\n{number}. {step}"))
    }

    /// The step that runs, for messages.
    pub(crate) fn step(&self) -> &'static str {
        self.step
    }

    /// A line that belongs to the step.
    pub(crate) fn tell(&mut self, text: impl Display) -> Result<()> {
        self.say(format_args!("   {text}"))
    }

    /// The output of a program.
    pub(crate) fn show<'a>(&mut self, lines: impl IntoIterator<Item = &'a str>) -> Result<()> {
        for line in lines {
            self.say(format_args!("     {line}"))?;
        }
        Ok(())
    }
}
