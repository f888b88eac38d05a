//! The wall clock as it was last believed: whoever deletes by age compares with it.

use super::{Life, Metadata};
use crate::store::record::Time;
use crate::store::{StoreError, keys};

impl Metadata {
    /// The time of the last commit that was made while the clock was believed.
    pub fn clock(&self) -> Result<Option<Time>, StoreError> {
        self.get(&keys::clock())
    }

    /// Notes that time with the next commit.
    pub fn put_clock(&mut self, now: Time) {
        self.put(Life::Durable, keys::clock(), &now);
    }
}
