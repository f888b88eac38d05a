//! fsx (`cargo install fsx`), the file system exerciser: random reads, writes, mappings, holes and
//! copies on one file, each read checked against a copy in memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;

use common::{Mode, Mount};

/// Everything that a file can do at any offset.
const BYTES: &str = "
[weights]
close_open = 5
invalidate = 3
fsync = 1
fdatasync = 1
truncate = 10
posix_fallocate = 5
punch_hole = 5
sendfile = 5
posix_fadvise = 2
copy_file_range = 5
";

/// Whole pages, as `O_DIRECT` and the engines' blocks have them, in a larger file.
const PAGES: &str = "
flen = 4194304
[opsize]
max = 262144
align = 4096
[weights]
close_open = 10
truncate = 5
punch_hole = 5
copy_file_range = 5
";

/// Mappings that are never synced while the file is closed and opened all the time.
const MAPPINGS: &str = "
nomsyncafterwrite = true
[weights]
close_open = 30
mapwrite = 30
mapread = 30
truncate = 10
fsync = 2
";

fn run(mode: Mode) {
    require!(fuse, root, fsx);
    let mount = Mount::new(mode);
    for (name, configuration, operations) in
        [("bytes", BYTES, 1500), ("pages", PAGES, 800), ("mappings", MAPPINGS, 1000)]
    {
        let file = mount.beside("fsx.toml");
        std::fs::write(&file, configuration).unwrap();
        for seed in [1, 20_260_101, 0xdead_beef_u64] {
            let output = Command::new("fsx")
                .args(["-N", &operations.to_string(), "-S", &seed.to_string()])
                .arg("-f")
                .arg(&file)
                .arg("-P")
                .arg(mount.store().parent().unwrap())
                .arg(mount.files(format!("{name}-{seed}")))
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{name}, seed {seed}:\n{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    assert_eq!(mount.errors(), Vec::<String>::new());
}

#[test]
fn passthrough() {
    run(Mode::Passthrough);
}

#[test]
fn served() {
    run(Mode::Served);
}
