//! Whether this machine can mount, and what would make a mount faster.

use std::fs::read_to_string;
use std::os::unix::fs::PermissionsExt;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;

use super::Findings;
use crate::cli::preflight::{allows_other, device};
use crate::cli::unmount::fusermount;

/// The first kernel whose FUSE hands reads and writes of a file to the file below it.
const PASSTHROUGH_SINCE: [u32; 2] = [6, 9];
/// The first kernel whose FUSE takes requests through `io_uring`.
const RINGS_SINCE: [u32; 2] = [6, 14];
/// Whoever has `CAP_SYS_ADMIN` has this bit (capability.h).
const SYS_ADMIN: u32 = 21;
/// Where a daemon and its clients hardly run out of descriptors.
const DESCRIPTORS_ENOUGH: u64 = 65_536;

/// Looks.
pub(super) fn look(findings: &mut Findings) {
    let release = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    look_at_kernel(findings, release.trim());
    match device() {
        Ok(()) => findings.good("/dev/fuse can be opened"),
        Err(line) => {
            // It ends with what mends it.
            let (what, mend) = line.rsplit_once(": ").unwrap_or((&line, "see dmesg"));
            findings.bad(what, mend);
        }
    }
    look_at_rights(findings);
    if version(&release).is_some_and(|version| version >= RINGS_SINCE) {
        look_at_rings(findings);
    }
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        if hard < DESCRIPTORS_ENOUGH {
            let mend = "ulimit -Hn 1048576, or LimitNOFILE=1048576 of the unit";
            findings.note(&format!("a process may open {hard} files"), mend);
        } else {
            findings.good(&format!("a process may open {hard} files"));
        }
    }
}

fn look_at_kernel(findings: &mut Findings, release: &str) {
    let Some(version) = version(release) else {
        return findings.note(&format!("a kernel of unknown version: {release:?}"), "");
    };
    if version < PASSTHROUGH_SINCE {
        let what = format!("Linux {release}: bytes of every file go through the daemon");
        findings
            .note(&what, "Linux 6.9 and later read and write files by themselves (passthrough)");
    } else if version < RINGS_SINCE {
        let what = format!("Linux {release}: requests come through /dev/fuse");
        findings
            .note(&what, "with Linux 6.14 and later they come through io_uring, which is faster");
    } else {
        findings.good(&format!("Linux {release}"));
    }
}

/// The first two numbers of a release such as `6.18.44-amd64`.
fn version(release: &str) -> Option<[u32; 2]> {
    let mut numbers = release.split(['.', '-', '+']).map(|part| part.trim().parse().ok());
    Some([numbers.next()??, numbers.next()??])
}

/// Who mounts.
fn look_at_rights(findings: &mut Findings) {
    let status = read_to_string("/proc/self/status").unwrap_or_default();
    if has_sys_admin(&status) {
        return findings.good("this user may mount, with passthrough and io_uring (CAP_SYS_ADMIN)");
    }
    if geteuid().is_root() {
        let mend = "give the container --cap-add SYS_ADMIN";
        return findings.bad("this is root without CAP_SYS_ADMIN, who cannot mount", mend);
    }
    match fusermount() {
        None => {
            return findings.bad("only root can mount without fusermount3", "apt install fuse3");
        }
        Some(path) => {
            let mode = path.metadata().map_or(0, |metadata| metadata.permissions().mode());
            let what = format!("users mount by {}", path.display());
            if mode & 0o4000 == 0 {
                let mend = format!("chmod u+s {}", path.display());
                return findings.bad(&format!("{what}, which is not set-user-ID"), &mend);
            }
            findings.good(&what);
        }
    }
    findings.note(
        "a mount of this user has neither passthrough nor turns io_uring on",
        "mount as root with --allow-other, or grant the daemon CAP_SYS_ADMIN",
    );
    if !allows_other(&read_to_string("/etc/fuse.conf").unwrap_or_default()) {
        let mend = "echo user_allow_other | sudo tee -a /etc/fuse.conf";
        findings.note("nobody else sees what this user mounts", mend);
    }
}

/// Whether a process has the right to mount, by its `/proc/PID/status`.
fn has_sys_admin(status: &str) -> bool {
    kvfs_os::effective_capabilities(status).is_some_and(|bits| bits & (1 << SYS_ADMIN) != 0)
}

fn look_at_rings(findings: &mut Findings) {
    if crate::fuse::rings_are_enabled() {
        findings.good("io_uring is on for FUSE (fuse.enable_uring)");
    } else {
        let mend = "kvfs mount as root turns it on; for users: echo Y | sudo tee \
                    /sys/module/fuse/parameters/enable_uring";
        findings.note("io_uring is off for FUSE", mend);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kernels() {
        fn check(release: &str, expected: Option<[u32; 2]>) {
            assert_eq!(version(release), expected, "{release}");
        }
        check("6.18.44-amd64\n", Some([6, 18]));
        check("6.8-rc1", Some([6, 8]));
        check("7", None);
        check("", None);
    }

    #[test]
    fn what_a_kernel_lacks_is_a_note() {
        let said = |release: &str| {
            let mut findings = Findings::default();
            look_at_kernel(&mut findings, release);
            assert!(!findings.is_ill());
            findings.text()
        };
        assert_eq!(said("6.18.1"), "good: Linux 6.18.1\n");
        assert!(said("6.8.0").contains("(passthrough)"));
        assert!(said("6.12.0").contains("through io_uring"));
        assert!(said("plan9").starts_with("note: a kernel of unknown version"));
    }

    #[test]
    fn the_right_to_mount_is_one_bit() {
        assert!(has_sys_admin("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_admin("CapEff:\t00000000a80425fb\n"), "Docker's default");
        assert!(!has_sys_admin(""));
    }
}
