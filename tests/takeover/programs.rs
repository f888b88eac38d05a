//! Programs that a mount is given to: by roundabout names, and such that cannot serve it.

use std::path::PathBuf;
use std::process::Command;

use kvfs::fs::takeover::FORMAT;

use crate::common::{Mount, forks};
use crate::steps::check_store;
use crate::{any_mode, mounted, try_upgrade, upgrade_command};

/// A program that does something, in C.
pub(crate) fn program(mount: &Mount, name: &str, does: &str) -> PathBuf {
    let (source, path) = (mount.beside(&format!("{name}.c")), mount.beside(name));
    let includes =
        ["signal", "stdio", "string", "unistd"].map(|name| format!("#include <{name}.h>\n"));
    let text = format!("{}int main(int count, char **arguments) {{ {does} }}\n", includes.concat());
    std::fs::write(&source, text).unwrap();
    let made = forks::output(Command::new("cc").arg("-o").arg(&path).arg(&source));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    path
}

/// What says that it can go on, and then does something else.
fn impostor(mount: &Mount, does: &str) -> PathBuf {
    let check = format!(
        "if (count > 2 && !strcmp(arguments[2], \"--check\")) return puts(\"kvfs take-over {FORMAT}\") < 0;"
    );
    program(mount, "impostor", &format!("{check} {does}"))
}

/// The mount helpers are links to the program, and do something else by these names. What leads to a program may lie in
/// the mount, which nobody serves meanwhile.
#[test]
fn a_program_is_found_by_any_name() {
    crate::require!(fuse);
    let mount = mounted(any_mode(), &[]);
    for link in [mount.beside("mount.kvfs"), mount.files("link")] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvfs"), &link).unwrap();
        // Root may; for others the kernel knows it still.
        let _ = std::fs::write("/proc/sys/vm/drop_caches", "2");
        let outcome = try_upgrade(&mount, Some(&link));
        assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    }
}

fn is_lost_and_comes_back(does: &str) {
    let mut mount = mounted(any_mode(), &[]);
    let program = impostor(&mount, does);
    std::fs::write(mount.files("synced"), "bytes").unwrap();
    crate::common::sys::sync_directory(mount.path()).unwrap();
    let mut command = upgrade_command(&mount, Some(&program));
    assert!(!forks::output(&mut command).status.success());
    mount.wait_until_it_ends();
    check_store(&mount);
    mount.mount();
    assert_eq!(std::fs::read_to_string(mount.files("synced")).unwrap(), "bytes");
}

#[test]
fn a_program_that_ends_takes_the_mount_with_it_and_nothing_else() {
    crate::require!(fuse, cc);
    is_lost_and_comes_back("return 3;");
}

#[test]
fn a_program_that_hangs_is_ended() {
    crate::require!(fuse, cc);
    is_lost_and_comes_back("for (;;) pause();");
}

#[test]
fn what_came_of_it_is_told_as_json_wherever_the_user_stands() {
    crate::require!(fuse);
    let mount = mounted(any_mode(), &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["upgrade", "--json"]).arg(mount.path().file_name().unwrap());
    let outcome = forks::output(command.current_dir(mount.path().parent().unwrap()));
    assert!(outcome.status.success(), "{outcome:?}");
    let told: serde_json::Value = serde_json::from_slice(&outcome.stdout).unwrap();
    assert_eq!(told["mountpoint"], mount.path().to_str().unwrap());
    assert_eq!(told["pid"], mount.status_number("pid"));
}
