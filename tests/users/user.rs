//! Users, each a thread of this process with credentials of its own: the kernel asks those of the thread
//! that calls, and a descriptor that one user has opened is there for all, as if it were handed on.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};

use crate::common::sys::become_user;

type Job = Box<dyn FnOnce() + Send>;

/// Somebody who does what the test says.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) name: &'static str,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Besides `gid`.
    pub(crate) groups: &'static [u32],
    jobs: Sender<Job>,
}

/// A group of two of the users, and one that nobody is in by default.
pub(crate) const TEAM: u32 = 2001;

/// Root, and users of whom two are in one more group.
pub(crate) fn everybody() -> [User; 4] {
    [
        User::new("root", 0, 0, &[]),
        User::new("alice", 1001, 1001, &[TEAM]),
        User::new("bob", 1002, 1002, &[TEAM]),
        User::new("carol", 1003, 1003, &[]),
    ]
}

impl User {
    fn new(name: &'static str, uid: u32, gid: u32, groups: &'static [u32]) -> User {
        let (jobs, received) = channel::<Job>();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                become_user(uid, gid, groups).unwrap();
                for job in received {
                    job();
                }
            })
            .unwrap();
        User { name, uid, gid, groups, jobs }
    }

    /// What comes of it when this user does it.
    pub(crate) fn does<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, answers) = channel();
        let job = Box::new(move || drop(answer.send(job())));
        self.jobs.send(job).unwrap();
        answers.recv().unwrap_or_else(|_| panic!("{} panicked", self.name))
    }

    pub(crate) fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }
}

/// A path that begins at an open directory, so that who may not enter what is above it can use it.
pub(crate) fn below(directory: &std::fs::File, path: &str) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}/{path}", directory.as_raw_fd()))
}
