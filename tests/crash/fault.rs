//! What a failing disk answers.

use std::io;

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// EIO or ESTALE: anything.
    Errno(i32),
    /// ENOSPC: only what needs space.
    Full,
    /// Half of what was to be written is, and then ENOSPC.
    Short,
}

/// One operation fails, or all from then on.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    kind: Kind,
    /// Operations of that kind until it happens.
    left: u64,
    is_sticky: bool,
    has_happened: bool,
}

pub(crate) enum Verdict {
    Pass,
    Fail(io::Error),
    Short(io::Error),
}

impl Fault {
    pub(crate) fn new(kind: Kind, after: u64, is_sticky: bool) -> Fault {
        Fault { kind, left: after, is_sticky, has_happened: false }
    }

    pub(crate) fn has_happened(&self) -> bool {
        self.has_happened
    }

    pub(crate) fn ask(&mut self, grows: bool) -> Verdict {
        if self.kind != Kind::Errno(libc::EIO) && self.kind != Kind::Errno(libc::ESTALE) && !grows {
            return Verdict::Pass;
        }
        if self.left > 0 {
            self.left -= 1;
            return Verdict::Pass;
        }
        if self.has_happened && !self.is_sticky {
            return Verdict::Pass;
        }
        self.has_happened = true;
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        match self.kind {
            Kind::Errno(errno) => Verdict::Fail(io::Error::from_raw_os_error(errno)),
            Kind::Full => Verdict::Fail(full()),
            Kind::Short => Verdict::Short(full()),
        }
    }
}
