//! stub
use std::path::Path;
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    env_logger::init();
    let mut options =
        kvfs::fuse::MountOptions::new(Path::new(&arguments[1]), Path::new(&arguments[2]));
    options.allow_other = true;
    if arguments.len() > 3 {
        options.passthrough = kvfs::fuse::Passthrough::Off;
    }
    if let Err(error) = kvfs::fuse::serve(&options, || ()) {
        eprintln!("kvfs: {error}");
        std::process::exit(1);
    }
}
