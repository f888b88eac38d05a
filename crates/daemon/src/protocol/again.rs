//! Requests that the kernel sends again because the daemon died that had them: what they ask for may have been done.

use fuser::Errno;

use super::wire::InHeader;
use crate::answer::Reply;

/// Set in the number of a request that is sent again (`FUSE_UNIQUE_RESEND`, include/uapi/linux/fuse.h).
const RESENT: u64 = 1 << 63;

/// Whether the daemon before may have done what a request asks for.
pub(super) fn may_be_done(header: &InHeader) -> bool {
    header.unique & RESENT != 0
}

/// The way of an answer that is well if what was asked for was done before.
pub(super) struct Again<R> {
    reply: R,
    /// What it fails with then.
    done: Option<Errno>,
}

impl<R> Again<R> {
    pub(super) fn new(header: &InHeader, done: Errno, reply: R) -> Again<R> {
        Again { reply, done: may_be_done(header).then_some(done) }
    }
}

impl<R: Reply<()>> Reply<()> for Again<R> {
    fn send(self, outcome: Result<(), Errno>) {
        self.reply.send(match outcome {
            Err(error) if self.done == Some(error) => Ok(()),
            outcome => outcome,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    struct Heard<'a>(&'a std::sync::Mutex<Vec<Result<(), Errno>>>);

    impl Reply<()> for Heard<'static> {
        fn send(self, outcome: Result<(), Errno>) {
            self.0.lock().unwrap().push(outcome);
        }
    }

    #[test]
    fn what_was_done_before_is_well_if_it_is_asked_again() {
        let heard: &'static _ = Box::leak(Box::default());
        for unique in [6, 6 | RESENT] {
            for error in [Errno::ENOENT, Errno::EIO] {
                let header = InHeader { unique, ..InHeader::new_zeroed() };
                Again::new(&header, Errno::ENOENT, Heard(heard)).send(Err(error));
            }
        }
        let expected = [Err(Errno::ENOENT), Err(Errno::EIO), Ok(()), Err(Errno::EIO)];
        assert_eq!(*heard.lock().unwrap(), expected);
    }
}
