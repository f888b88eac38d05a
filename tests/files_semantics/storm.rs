//! Many threads do everything to a few names while commits run: nothing is lost, torn or leaked.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::common::sys::{map_mut, open, rename, sync_directory};
use crate::common::{Mode, Mount};

in_both_modes!(a_storm_on_few_names);

const DURATION: Duration = Duration::from_secs(3);
const NAMES: usize = 6;

/// What may happen to a name that others change as well.
fn expect(outcome: std::io::Result<()>, allowed: &[i32]) {
    if let Err(error) = outcome {
        let code = error.raw_os_error().unwrap_or(0);
        assert!(allowed.contains(&code), "{error}");
    }
}

fn a_storm_on_few_names(mode: Mode) {
    let mut mount = Mount::new(mode);
    let end = Instant::now() + DURATION;
    let files = mount.files("");
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let files = &files;
            scope.spawn(move || {
                let mut choice = thread;
                while Instant::now() < end {
                    choice = choice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let pick = |shift: u32| usize::try_from((choice >> shift) % 64).unwrap();
                    let one = files.join(format!("n{}", pick(20) % NAMES));
                    let two = files.join(format!("n{}", pick(28) % NAMES));
                    let flags = libc::O_RDWR | libc::O_CREAT;
                    let outcome = match pick(36) % 9 {
                        0 => open(&one, flags | libc::O_TRUNC)
                            .and_then(|file| file.write_all_at(&[1; 3000], 0)),
                        1 => open(&one, flags | libc::O_APPEND)
                            .and_then(|file| std::io::Write::write_all(&mut &file, &[2; 500])),
                        2 => open(&one, flags).and_then(|file| {
                            file.set_len(5000)?;
                            // Others cut the file: it is only held, not touched.
                            let mapped = map_mut(&file);
                            drop(file);
                            drop(mapped);
                            Ok(())
                        }),
                        3 => rename(&one, &two),
                        4 => fs::remove_file(&one),
                        5 => fs::hard_link(&one, &two),
                        6 => nix::unistd::truncate(&one, 100).map_err(std::io::Error::from),
                        7 => open(&one, libc::O_RDONLY).and_then(|file| file.sync_all()),
                        _ => fs::read(&one).map(drop),
                    };
                    expect(outcome, &[libc::ENOENT, libc::EEXIST]);
                }
            });
        }
    });
    sync_directory(&files).unwrap();
    let contents = || -> Vec<_> {
        (0..NAMES).map(|index| fs::read(files.join(format!("n{index}"))).ok()).collect()
    };
    let before = contents();
    assert_eq!(mount.errors(), Vec::<String>::new());
    mount.remount();
    assert!(contents() == before, "a remount changes nothing");
    for index in 0..NAMES {
        expect(fs::remove_file(files.join(format!("n{index}"))), &[libc::ENOENT]);
    }
    mount.remount();
    assert_eq!((mount.objects().len(), mount.staging().len()), (0, 0));
    assert_eq!(mount.status_number("objects"), 0);
    assert_eq!(mount.status_number("stored_bytes"), 0);
}
