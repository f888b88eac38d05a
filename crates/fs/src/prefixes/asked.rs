//! What was asked of each model through `prefixes/match`, and found: who looks at a mount sees which models its cache is
//! for.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::FileSystem;
use kvfs_storage::store::record::InodeId;

/// Models that are counted apart: some 60 bytes each. What is asked of any further one counts as that of others.
const MODELS_MAX: usize = 256;
/// Lines of a status, those that were asked most first, and one for the others.
const LINES_MAX: usize = 16;

/// Questions of one model, with tokens that were asked and those that the answers have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    questions: u64,
    asked_tokens: u64,
    answered_tokens: u64,
}

impl Use {
    fn add(&mut self, other: Use) {
        self.questions += other.questions;
        self.asked_tokens += other.asked_tokens;
        self.answered_tokens += other.answered_tokens;
    }
}

/// All of them since the mount began, by the model's directory.
#[derive(Debug, Default)]
pub(super) struct Asked {
    models: Mutex<(BTreeMap<InodeId, Use>, Use)>,
}

impl Asked {
    /// A question was answered.
    pub(super) fn note(&self, model: InodeId, asked_tokens: u64, answered_tokens: u64) {
        let (models, others) = &mut *self.locked();
        let is_counted = models.contains_key(&model) || models.len() < MODELS_MAX;
        let counted = if is_counted { models.entry(model).or_default() } else { others };
        counted.add(Use { questions: 1, asked_tokens, answered_tokens });
    }

    fn locked(&self) -> MutexGuard<'_, (BTreeMap<InodeId, Use>, Use)> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that were asked most, and what is left: of others, and of models without a path.
    fn most(&self, path: impl Fn(InodeId) -> Option<String>) -> (Vec<(String, Use)>, Use) {
        let (models, mut others) = self.locked().clone();
        let mut models: Vec<(InodeId, Use)> = models.into_iter().collect();
        models.sort_by_key(|(_, counted)| Reverse(counted.asked_tokens));
        let mut lines = Vec::new();
        for (model, counted) in models {
            match (lines.len() < LINES_MAX).then(|| path(model)).flatten() {
                Some(path) => lines.push((path, counted)),
                None => others.add(counted),
            }
        }
        (lines, others)
    }
}

/// Lines `model PATH: ...` of a status.
pub(crate) fn add_models(fs: &FileSystem, text: &mut String) {
    let (mut lines, others) = fs.prefixes.asked.most(|id| fs.core.state().directory_path(id));
    if others.questions > 0 {
        lines.push(("others".to_owned(), others));
    }
    for (path, counted) in lines {
        let path = kvfs_page::printable(path.chars());
        let Use { questions, asked_tokens, answered_tokens } = counted;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "model {path}: questions={questions} asked_tokens={asked_tokens} answered_tokens={answered_tokens}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_that_were_asked_most_come_first_and_nothing_is_lost() {
        let asked = Asked::default();
        for model in 0..300_u64 {
            asked.note(InodeId(model), model + 1, model);
            asked.note(InodeId(model), 1, 0);
        }
        // One has no path any more.
        let (lines, others) = asked.most(|id| (id.0 != 254).then(|| format!("models/{}", id.0)));
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines[0].0, "models/255");
        assert_eq!(lines[1].0, "models/253");
        let whole = |of: fn(&Use) -> u64| {
            lines.iter().map(|(_, counted)| of(counted)).sum::<u64>() + of(&others)
        };
        assert_eq!(whole(|counted| counted.questions), 600);
        assert_eq!(whole(|counted| counted.asked_tokens), 300 * 301 / 2 + 300);
        assert_eq!(whole(|counted| counted.answered_tokens), 299 * 300 / 2);
        assert_eq!(asked.locked().0.len(), MODELS_MAX);
    }
}
