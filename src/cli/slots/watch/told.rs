//! What a watch says: each thing once, when it begins, although it is found again at every look.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::cli::output::complain;
use crate::page::printable;

/// What a line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    Server,
    Model,
    /// What a server that is new was to be given.
    Filling,
    Slot(u64),
}

/// What is wrong now, as it was said last.
#[derive(Debug, Default)]
pub(super) struct Told {
    wrong: BTreeMap<Subject, String>,
}

impl Told {
    /// Whether somebody must hear of something wrong: not of what is as it was.
    fn is_news(&mut self, subject: Subject, line: &str) -> bool {
        let before = self.wrong.insert(subject, line.to_owned());
        before.is_none_or(|before| before != line)
    }

    /// Something is wrong.
    pub(super) fn wrong(&mut self, subject: Subject, line: &str) {
        if self.is_news(subject, line) {
            complain("kvfs", line);
        }
    }

    /// It is not wrong any more. Whether it was.
    pub(super) fn right(&mut self, subject: Subject) -> bool {
        self.wrong.remove(&subject).is_some()
    }

    /// What was said of slots is about a server that is gone.
    pub(super) fn forget_slots(&mut self) {
        self.wrong.retain(|subject, _| matches!(subject, Subject::Server | Subject::Model));
    }
}

/// A line on standard output; whoever waits for signals sees that nobody reads any more.
pub(super) fn say(line: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{}", printable(line.chars())).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_as_it_was_is_no_news() {
        let mut told = Told::default();
        assert!(told.is_news(Subject::Server, "gone"));
        assert!(!told.is_news(Subject::Server, "gone"));
        assert!(told.is_news(Subject::Slot(0), "gone"));
        assert!(told.is_news(Subject::Server, "silent"));
        assert!(told.right(Subject::Server) && !told.right(Subject::Server));
        assert!(told.is_news(Subject::Server, "silent"));
        told.forget_slots();
        assert!(told.is_news(Subject::Slot(0), "gone"));
        assert!(!told.is_news(Subject::Server, "silent"));
    }
}
