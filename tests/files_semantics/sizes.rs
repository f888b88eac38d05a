//! Names, paths, links and attributes as long as the kernel lets them be, and one byte more.

use std::fs;
use std::os::unix::fs::symlink;

use crate::common::sys::{assert_errno, attribute, setxattr};
use crate::common::{Mode, Mount};

in_both_modes!(
    a_link_may_have_a_target_of_4095_bytes,
    an_attribute_may_have_64_kib,
    a_path_may_have_4095_bytes
);

fn a_link_may_have_a_target_of_4095_bytes(mode: Mode) {
    let mut mount = Mount::new(mode);
    let target = "t".repeat(4095);
    symlink(&target, mount.files("link")).unwrap();
    assert_errno(symlink(format!("{target}t"), mount.files("longer")), libc::ENAMETOOLONG);
    mount.remount();
    assert_eq!(fs::read_link(mount.files("link")).unwrap().to_str(), Some(target.as_str()));
    assert_eq!(fs::symlink_metadata(mount.files("link")).unwrap().len(), 4095);
    assert!(!mount.files("longer").exists());
}

fn an_attribute_may_have_64_kib(mode: Mode) {
    let mut mount = Mount::new(mode);
    let file = mount.files("file");
    fs::write(&file, "x").unwrap();
    let name = format!("user.{}", "n".repeat(250));
    let value = vec![7; 64 << 10];
    setxattr(&file, &name, &value).unwrap();
    assert_errno(setxattr(&file, "user.longer", &vec![7; (64 << 10) + 1]), libc::E2BIG);
    assert_errno(setxattr(&file, &format!("{name}n"), b"x"), libc::ERANGE);
    mount.remount();
    assert_eq!(attribute(mount.files("file"), &name).unwrap(), value);
}

fn a_path_may_have_4095_bytes(mode: Mode) {
    let mut mount = Mount::new(mode);
    let mut path = mount.files("");
    while path.as_os_str().len() < 4095 - 250 {
        path.push("d".repeat(200));
        fs::create_dir(&path).unwrap();
    }
    let left = 4095 - path.as_os_str().len() - 1;
    let file = path.join("f".repeat(left));
    assert_eq!(file.as_os_str().len(), 4095);
    fs::write(&file, "bytes").unwrap();
    let longer = path.join("f".repeat(left + 1));
    assert_errno(fs::write(longer, "bytes"), libc::ENAMETOOLONG);
    mount.remount();
    assert_eq!(fs::read_to_string(file).unwrap(), "bytes");
}
