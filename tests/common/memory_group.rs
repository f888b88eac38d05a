//! Programs with a bound on their memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A control group, of either version, that goes when it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// For programs whose memory, what is cached of files for them included, is bounded. The error
    /// says why that cannot be had here.
    pub(crate) fn new(bytes: u64) -> Result<MemoryGroup, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unified = Path::new("/sys/fs/cgroup");
        let old = unified.join("memory");
        let (root, limit) = if old.join("memory.limit_in_bytes").exists() {
            (old.as_path(), "memory.limit_in_bytes")
        } else {
            // Refused where it is so already, or by a group that is not at the top.
            let _ = fs::write(unified.join("cgroup.subtree_control"), "+memory");
            (unified, "memory.max")
        };
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let group = root.join(format!("kvfs-test-{}-{number}", std::process::id()));
        let failed = |error| format!("no control groups: {}: {error}", group.display());
        fs::create_dir(&group).map_err(failed)?;
        let made = MemoryGroup(group.clone());
        fs::write(group.join(limit), bytes.to_string()).map_err(failed)?;
        // Where there is swap it must not take what does not fit.
        for (name, value) in [("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", bytes)] {
            let _ = fs::write(group.join(name), value.to_string());
        }
        Ok(made)
    }

    /// The same program, in the group from its first instruction on.
    pub(crate) fn bound(&self, program: &Command) -> Command {
        let mut bound = Command::new("sh");
        bound.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(self.0.join("cgroup.procs"));
        bound.arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => bound.env(name, value),
                None => bound.env_remove(name),
            };
        }
        bound
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A program that has just ended may still be on its way out.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
