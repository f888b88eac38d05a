//! Sequences of operations on `files/` and on pages, against the model of `tests/files_model`: the
//! bytes are the choices that it makes at random, names, sizes, crashes and all.

use super::engine::{Outcome, Target, directory_in_memory};
use crate::common::random::Random;
use crate::library;

pub(crate) fn target() -> Target {
    let mut random = Random::of(5);
    Target {
        name: "operations",
        length_max: 600,
        seeds: (0..6).map(|_| random.bytes(200)).collect(),
        words: &[],
        allocation_max: 32 << 20,
        run: Box::new(|input| {
            // A sequence without an end is refused, so that both outcomes exist.
            if input.is_empty() {
                return Outcome::refused(&"nothing to do");
            }
            library::follow(Random::given(input), directory_in_memory());
            Outcome::accepted(input.len().ilog2())
        }),
    }
}
