//! A bound on the memory of this process.

use std::fs;
use std::path::{Path, PathBuf};

/// The process is in a control group of its own while this lives.
#[derive(Debug)]
pub(super) struct MemoryLimit {
    group: PathBuf,
    /// `cgroup.procs` of the group that it came from.
    home: PathBuf,
}

impl MemoryLimit {
    /// Bounds what the process and its page cache take from now on. The error says why that cannot
    /// be done here.
    pub(super) fn enter(bytes: u64) -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let path = |controllers: &str| {
            groups.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                (parts.next()? == controllers).then(|| parts.next())?
            })
        };
        let unified = Path::new("/sys/fs/cgroup");
        if let Some(own) = path("memory") {
            let root = unified.join("memory");
            return Self::make(&root, own, "memory.limit_in_bytes", bytes);
        }
        let own = path("").ok_or("there are no control groups")?;
        // Refused where it is so already, or by a group that is not at the top.
        let _ = fs::write(unified.join("cgroup.subtree_control"), "+memory");
        Self::make(unified, own, "memory.max", bytes)
    }

    fn make(root: &Path, own: &str, limit: &str, bytes: u64) -> Result<Self, String> {
        let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let group = root.join(format!("kvfs-bench-{}", std::process::id()));
        fs::create_dir(&group).map_err(|error| failed(&group, error))?;
        let home = root.join(own.trim_start_matches('/')).join("cgroup.procs");
        let made = Self { group, home };
        for (name, value) in [(limit, bytes), ("cgroup.procs", u64::from(std::process::id()))] {
            let path = made.group.join(name);
            fs::write(&path, value.to_string()).map_err(|error| failed(&path, error))?;
        }
        Ok(made)
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // What cannot be undone ends with the process.
        let _ = fs::write(&self.home, std::process::id().to_string());
        let _ = fs::remove_dir(&self.group);
    }
}
