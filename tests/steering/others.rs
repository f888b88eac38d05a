//! Only root and the user of the daemon change settings.

use crate::common::forks::{output, shell_as};
use crate::common::{Mode, Mount};
use crate::{set, shown};

as_root!((fuse, root, setpriv) another_user_may_not);

const SOMEBODY: u32 = 1001;

fn another_user_may_not(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let before = shown(&mount);
    let kvfs = env!("CARGO_BIN_EXE_kvfs");
    let place = mount.path().display();
    let attempts = [
        (format!("{kvfs} config set ram=1M {place}"), "only root and the user of its daemon may"),
        (format!("{kvfs} config show {place}"), "only root and the user of its daemon may"),
        (
            format!("{kvfs} /store {place} -o remount,ram=1M"),
            "only root and the user of its daemon may",
        ),
        (format!("exec 3<>{place}/.kvfs/settings; echo ram=1M >&3; cat <&3"), "ermission denied"),
    ];
    for (script, expected) in attempts {
        let ended = output(&mut shell_as(std::path::Path::new("/"), SOMEBODY, &script));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.contains(expected), "{script}: {said}");
    }
    assert_eq!(shown(&mount), before);
    set(&mount, &["ram=32M"]);
}
