//! `user.kvfs.prefill_rate` of a model's directory: tokens that its engine computes in a second, as somebody has
//! measured it. Without it nobody can tell how many seconds a page saves, and nobody does.

use crate::FsError;
use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::record::{DirectoryClass, InodeId, Time};

/// Its name. Stored.
pub(crate) const PREFILL_RATE: &[u8] = b"user.kvfs.prefill_rate";

/// More than any machine computes: a mistake.
const RATE_MAX: u32 = 100_000_000;

/// Sets it: a whole number of tokens a second.
pub(crate) fn set(core: &Core, id: InodeId, value: &[u8]) -> Result<(), FsError> {
    if !value.iter().all(u8::is_ascii_digit) {
        return Err(FsError::Invalid);
    }
    let text = std::str::from_utf8(value).map_err(|_| FsError::Invalid)?;
    let rate: u32 = text.parse().map_err(|_| FsError::Invalid)?;
    if !(1..=RATE_MAX).contains(&rate) {
        return Err(FsError::Invalid);
    }
    let mut state = core.state_to_change()?;
    let (mut inode, class) = state.directory(id)?;
    if class != DirectoryClass::Model {
        return Err(FsError::Unsupported);
    }
    let life = state.metadata.life(id);
    state.metadata.put_attribute(life, id, PREFILL_RATE, rate.to_string().as_bytes());
    inode.ctime = Time::now();
    state.put_inode(id, &inode);
    Ok(())
}

/// In tokens per second, if somebody has told it.
pub(super) fn of(state: &State, model: InodeId) -> Option<u32> {
    let value = state.metadata.attribute(model, PREFILL_RATE).ok()??;
    std::str::from_utf8(&value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    #[test]
    fn only_a_model_has_one_and_it_is_a_number() {
        let unmounted = Unmounted::new();
        let model = unmounted.make_model(2).directory;
        let core = &unmounted.fs.core;
        for wrong in ["0", "-1", "+5", " 5", "5\n", "fast", "1.5", "100000001", ""] {
            let refused = set(core, model, wrong.as_bytes()).unwrap_err();
            assert_eq!(refused.errno(), libc::EINVAL, "{wrong}");
        }
        assert_eq!(set(core, FILES, b"10").unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(of(&core.state(), model), None);
        set(core, model, b"4500").unwrap();
        assert_eq!(of(&core.state(), model), Some(4500));
    }
}
