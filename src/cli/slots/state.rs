//! What a server says of one of its slots.
//!
//! ```text
//! { "id": 1, "n_ctx": 4096, "is_processing": false,                a slot since the server started
//!   "id_task": 17, "n_prompt_tokens": 107, "next_token": ... }     once a task has used it
//! ```
//!
//! Each task has a higher number than those before. `n_prompt_tokens` is what the slot has now, answers
//! included: none once it was cleared. Servers before it counted do not tell.

use serde_json::Value;

/// A slot as it was listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotState {
    pub(super) number: u64,
    pub(super) is_processing: bool,
    /// `None` until a task has used it since the server started.
    pub(super) turn: Option<Turn>,
    /// Tokens that it may have, if the server tells.
    pub(super) room: Option<u64>,
}

/// What tells the content of a slot from what it was before, in one run of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) task: u64,
    /// Tokens that it has, if the server tells.
    pub(super) tokens: Option<u64>,
}

impl SlotState {
    /// Reads an entry of the list.
    pub(super) fn of(entry: &Value) -> Option<Self> {
        // A server says -1, or nothing, of a slot that had no task.
        let task = entry["id_task"].as_u64();
        Some(Self {
            number: entry["id"].as_u64()?,
            is_processing: entry["is_processing"].as_bool().unwrap_or(false),
            turn: task.map(|task| Turn { task, tokens: entry["n_prompt_tokens"].as_u64() }),
            room: entry["n_ctx"].as_u64(),
        })
    }

    /// Whether it has had no task since the server started.
    pub(super) fn is_unused(&self) -> bool {
        self.turn.is_none() && !self.is_processing
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slots_that_nobody_used() {
        fn check(slot: &Value, expected: bool) {
            assert_eq!(SlotState::of(slot).unwrap().is_unused(), expected, "{slot}");
        }
        check(&json!({ "id": 0, "is_processing": false }), true);
        check(&json!({ "id": 0, "id_task": -1 }), true);
        check(&json!({ "id": 0, "id_task": 4 }), false);
        check(&json!({ "id": 0, "is_processing": true }), false);
    }

    #[test]
    fn what_is_no_slot() {
        for entry in [json!(null), json!([]), json!({ "id": "0" }), json!({ "id": -1 })] {
            assert_eq!(SlotState::of(&entry), None, "{entry}");
        }
    }
}
