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
    /// An errno, but only of what makes something durable.
    Sync(i32),
}

/// What the disk is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Something that needs space.
    Grow,
    /// To make something durable.
    Sync,
    Other,
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

    pub(crate) fn ask(&mut self, request: Request) -> Verdict {
        let is_meant = match self.kind {
            Kind::Errno(_) => true,
            Kind::Full | Kind::Short => request == Request::Grow,
            Kind::Sync(_) => request == Request::Sync,
        };
        if !is_meant {
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
        let error = io::Error::from_raw_os_error;
        match self.kind {
            Kind::Errno(errno) | Kind::Sync(errno) => Verdict::Fail(error(errno)),
            Kind::Full => Verdict::Fail(error(libc::ENOSPC)),
            Kind::Short => Verdict::Short(error(libc::ENOSPC)),
        }
    }
}
