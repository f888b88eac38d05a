//! Which process serves a mount. The store that a mount names may have been moved since, and another one may lie in its
//! place; but each descriptor of `/dev/fuse` tells its connection (`fuse_connection` in `/proc/PID/fdinfo`, newer kernels).

use std::fs;
use std::path::Path;

use super::process::{Process, is_keeper};

/// The process that serves the mount of a device (`MAJOR:MINOR`), if the kernel tells.
pub(crate) fn server(device: &str) -> Option<Process> {
    let (_, connection) = device.split_once(':')?;
    let pids = fs::read_dir("/proc").ok()?.flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // A keeper only has it.
    let serves = |pid: &i32| {
        serves(&Path::new("/proc").join(pid.to_string()), connection) && !is_keeper(*pid)
    };
    // A thread that takes a mount over shares its descriptors for a moment with the one that it is of.
    pids.filter(serves).find_map(Process::find)
}

/// Whether a process serves the mount of a device, if the kernel tells.
pub(crate) fn is_served_by(device: &str, pid: i32) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    device.split_once(':').is_some_and(|(_, connection)| serves(&process, connection))
}

fn serves(process: &Path, connection: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return false };
    descriptors.flatten().any(|descriptor| {
        let is_device =
            || fs::read_link(descriptor.path()).is_ok_and(|path| path == Path::new("/dev/fuse"));
        let told = || fs::read_to_string(process.join("fdinfo").join(descriptor.file_name()));
        is_device() && told().is_ok_and(|text| is_of(&text, connection))
    })
}

fn is_of(descriptor: &str, connection: &str) -> bool {
    let mut told = descriptor.lines().filter_map(|line| line.strip_prefix("fuse_connection:"));
    told.any(|told| told.trim() == connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_of_the_connection_that_it_names() {
        let text = "pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t90\nfuse_connection:\t40\n";
        assert!(is_of(text, "40") && !is_of(text, "4") && !is_of(text, "90"));
        assert!(!is_of("pos:\t0\nino:\t40\n", "40"));
    }

    #[test]
    fn nobody_serves_what_is_not_there() {
        assert_eq!(server("0:99999999"), None);
        assert_eq!(server("none"), None);
        assert!(!is_served_by("0:99999999", 1) && !is_served_by("none", 1));
    }
}
