//! What is done again and again, and fails alike each time, fills no log.

use std::fmt::Display;

/// What was told last of it.
#[derive(Debug, Default)]
pub(super) struct Complaint(Option<String>);

impl Complaint {
    /// Why it has failed, if that is to be told: it had not, or for another reason.
    pub(super) fn of(&mut self, outcome: &Result<(), impl Display>) -> Option<&str> {
        let why = outcome.as_ref().err().map(ToString::to_string);
        if why == self.0 {
            return None;
        }
        self.0 = why;
        self.0.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::Complaint;

    #[test]
    fn a_failure_is_told_once_and_again_after_it_has_passed_or_changed() {
        let mut complaint = Complaint::default();
        let outcomes = [Ok(()), Err("full"), Err("full"), Err("gone"), Ok(()), Err("gone")];
        let told: Vec<_> =
            outcomes.iter().map(|outcome| complaint.of(outcome).map(str::to_owned)).collect();
        let expected = [None, Some("full"), None, Some("gone"), None, Some("gone")];
        assert_eq!(told, expected.map(|line| line.map(str::to_owned)));
    }
}
