//! `trainer selftest --distributed`, without a launcher and on ranks that this test starts.

use super::harness::{Output, Place, binary, finish};

use std::process::{Command, Stdio};

fn selftest(place: &Place, arguments: &[&str], variables: &[(&str, String)]) -> Output {
    let mut command = Command::new(binary());
    command.args(["selftest", "--distributed", "--device", "cpu"]).args(arguments);
    command.current_dir(place.path(".")).stdin(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    finish(&mut command)
}

#[test]
fn all_cases_of_the_self_test_pass() {
    let place = Place::empty();
    let output = selftest(&place, &["--megabytes", "1"], &[]).ends_with(0);
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(lines.len(), 26, "{}", output.stdout);
    assert!(lines[..25].iter().all(|line| line.starts_with("ok ")), "{}", output.stdout);
    assert_eq!(lines[25], "25 of 25 cases passed on 4 ranks");
}
