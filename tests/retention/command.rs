//! `kvfs quota`.

use std::process::{Command, Output};

use crate::common::{Mode, Mount, eventually, forks};
use crate::{FILE_BYTES, wait_until_gone, write_files};

in_both_modes!(limits_are_set_and_shown);

fn quota(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::output(command.arg("quota").args(arguments))
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn limits_are_set_and_shown(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    std::fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 2);
    let (root, path) = (mount.path().to_str().unwrap(), directory.to_str().unwrap());
    assert_eq!(printed(&quota(&[root])), "no directory has a limit\n");
    printed(&quota(&["--size", "100K", "--age", "7d", path]));
    wait_until_gone(&files[0]);
    let shown: serde_json::Value =
        serde_json::from_str(&printed(&quota(&["--json", path]))).unwrap();
    assert_eq!(shown["size_bytes"], 100 << 10);
    assert_eq!(shown["age_seconds"], 7 * 86_400);
    assert_eq!(shown["ttl_seconds"], serde_json::Value::Null);
    // The name goes before it is counted.
    let all = eventually("both to be counted", || {
        let all: serde_json::Value =
            serde_json::from_str(&printed(&quota(&["--json", root]))).unwrap();
        (all[0]["removed_bytes"] == 2 * FILE_BYTES).then_some(all)
    });
    assert_eq!(all[0]["path"], "files/cache");
    assert!(printed(&quota(&[root])).contains("at most 100.0 KiB, used within 7 days"));
    printed(&quota(&["--size", "none", "--age", "none", path]));
    assert_eq!(printed(&quota(&[root])), "no directory has a limit\n");
    printed(&quota(&["--ttl", "1h", "--renew", path]));
    let shown: serde_json::Value =
        serde_json::from_str(&printed(&quota(&["--json", path]))).unwrap();
    assert_eq!((&shown["ttl_seconds"], &shown["ttl_renewed"]), (&3600.into(), &true.into()));
    assert!(printed(&quota(&[path])).contains("1 hour, renewed by each use"));
    eventually("the status to tell it", || {
        printed(&quota(&[root])).contains("written or used within 1 hour").then_some(())
    });
    assert_eq!(quota(&["--ttl", "none", "--renew", path]).status.code(), Some(2));
    let refused = quota(&["--size", "0", path]);
    assert_eq!(refused.status.code(), Some(2));
    let too_long = quota(&["--age", "1000000000000w", path]);
    let told = String::from_utf8_lossy(&too_long.stderr).into_owned();
    assert_eq!((too_long.status.code(), told.lines().count()), (Some(1), 1), "{told}");
    assert!(told.contains("the largest limits are 1000 years"), "{told}");
    for arguments in [&["--age", "1d"][..], &[]] {
        let own = format!("{root}/.kvfs");
        let refused = quota(&[arguments, &[own.as_str()]].concat());
        let told = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!((refused.status.code(), told.lines().count()), (Some(1), 1), "{told}");
        assert!(told.contains("only directories in files/"), "{told}");
    }
    let refused = quota(&["--size", "1G", root]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("only directories in files/"));
}
