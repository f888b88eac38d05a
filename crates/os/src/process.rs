//! Copies of this process, and its threads' share of the machine.

use std::io;

use nix::sys::resource::{Resource, getrlimit};
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

/// How many files this process may have open at a time.
pub fn open_files_max() -> io::Result<u64> {
    Ok(getrlimit(Resource::RLIMIT_NOFILE)?.0)
}

/// What of a busy processor a thread gets whose work goes on beside everybody else's: this beside one thread that wants
/// all of it, less beside more. It is for good: a thread without privileges cannot ask for more again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// What nobody else wants, and the disk after everybody else: a three hundredth beside engines that spin while they
    /// wait. For work that nobody ever waits for, by a thread that holds no lock that others need.
    Leftovers,
    /// For work that somebody may wait for before it ends.
    Tenth,
    /// Somebody waits for the work to end.
    Quarter,
}

impl Share {
    /// The calling thread has this share from now on.
    pub fn take(self) {
        // The kernel gives a thread of nice 0 a weight of 1024, one of nice 5 335 and one of nice 10 110.
        match self {
            Share::Leftovers => be_idle(),
            Share::Tenth => be_nice(10),
            Share::Quarter => be_nice(5),
        }
    }
}

/// Relative to what the whole daemon was given.
fn be_nice(increment: libc::c_int) {
    // SAFETY: it takes a number. Of a thread, although POSIX says of a process: see `nice(2)`.
    unsafe { libc::nice(increment) };
}

fn be_idle() {
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

    /// Nice value and scheduling policy of the calling thread: see `proc_pid_stat(5)`.
    fn scheduling() -> (i32, i32) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[16].parse().unwrap(), fields[38].parse().unwrap())
    }

    #[test]
    fn a_share_is_one_threads() {
        let here = scheduling();
        let with = |share: Share| {
            let shared = || {
                share.take();
                scheduling()
            };
            std::thread::scope(|scope| scope.spawn(shared).join().unwrap())
        };
        assert_eq!(with(Share::Leftovers).1, libc::SCHED_IDLE);
        for (share, increment) in [(Share::Tenth, 10), (Share::Quarter, 5)] {
            assert_eq!(with(share), ((here.0 + increment).min(19), here.1));
        }
        assert_eq!(scheduling(), here);
    }

    #[test]
    fn a_limit_of_sizes_ends_no_process() {
        refuse_large_files();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert!(ignored >> (libc::SIGXFSZ - 1) & 1 == 1, "{ignored:x}");
    }
}
