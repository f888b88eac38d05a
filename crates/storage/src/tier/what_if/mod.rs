//! What another budget would have done: the uses that a mount has seen, and the policy of the tiers played on them.
//!
//! The policy adapts and knows runs, so no table of reuse distances says what it finds (that of SHARDS, Waldspurger
//! et al., FAST '15, is exact for LRU alone). So the uses themselves are kept, 16 bytes each and at most 5 MiB, of a
//! sample of the objects that is chosen by their hash ([`Sample`]); whoever asks gets them ([`Seen`]) and plays the real
//! [`Replacement`](super::replacement::Replacement) on them, in his own process, with the share of the budget that the
//! sample is of all objects ([`Play`]; "miniature simulation", Waldspurger et al., USENIX ATC '17). Until 300,000
//! uses were seen the sample is all of them, and the answer is a replay.
//!
//! Nothing here knows of files or of a mount.

mod play;
mod record;
mod sample;
mod seen;

pub use play::{Play, Played};
pub use record::Happened;
pub use sample::Sample;
pub use seen::Seen;

#[cfg(test)]
mod tests;
