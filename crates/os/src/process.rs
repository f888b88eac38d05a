//! Copies of this process, and its threads' share of the machine.

use std::io;

use nix::unistd::ForkResult;

/// Makes a copy of this process, which must have one thread: in the copy of another, locks would
/// stay taken for ever.
pub fn fork() -> io::Result<ForkResult> {
    if std::fs::read_dir("/proc/self/task")?.count() > 1 {
        return Err(io::Error::other("the process already has threads"));
    }
    // SAFETY: there is no other thread, so the child may do whatever this one may.
    let result = unsafe { nix::unistd::fork() };
    Ok(result?)
}

/// Lets everybody else have the processor and the disk before this thread: for work that nobody
/// waits for. It must hold no lock that others need.
pub fn be_idle() {
    /// `ioprio_set(2)`: of one thread, here the calling one.
    const WHO_THREAD: libc::c_long = 1;
    /// The class that is served when nobody else asks.
    const CLASS_IDLE: libc::c_long = 3 << 13;
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; the kernel reads the structure, which outlives the call.
    // `SCHED_IDLE` gives way at once to whoever wakes up, which the lowest nice value does not.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    // SAFETY: the same. A kernel without it leaves the disk's order as it is.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_THREAD, 0, CLASS_IDLE) };
}

/// Has a write beyond `RLIMIT_FSIZE` answered with EFBIG. Else the kernel sends SIGXFSZ as well, whose default action ends
/// the process, and all that others do with it: see setrlimit(2).
pub fn refuse_large_files() {
    // SAFETY: ignoring a signal installs no handler that could run.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_sizes_ends_no_process() {
        refuse_large_files();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert!(ignored >> (libc::SIGXFSZ - 1) & 1 == 1, "{ignored:x}");
    }
}
