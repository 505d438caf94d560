//! The paths of a config.

use super::RunConfig;
use settings::Setting;
use std::convert::Infallible;
use std::path::PathBuf;

impl RunConfig {
    /// The config with `~` and `$` in its paths written so that expanding them gives these paths.
    #[must_use]
    pub fn with_escaped_paths(&self) -> Self {
        self.with_paths(|path| {
            let here = if path.starts_with('~') { "./" } else { "" };
            format!("{here}{}", path.replace('$', "$$"))
        })
    }

    /// The reverse of [`Self::with_escaped_paths`]. `./~` stays, which is the same path.
    #[must_use]
    pub fn with_unescaped_paths(&self) -> Self {
        self.with_paths(|path| path.replace("$$", "$"))
    }

    fn with_paths(&self, replace: impl Fn(&str) -> String) -> Self {
        let mut config = self.clone();
        config.expand_paths(&|path| Ok::<_, Infallible>(replace(path)));
        config
    }

    /// Replaces each path by what `expand` returns. Paths with an error stay as they are; each
    /// error comes with the keys of its path.
    pub fn expand_paths<E>(
        &mut self,
        expand: &dyn Fn(&str) -> Result<String, E>,
    ) -> Vec<(Vec<String>, E)> {
        let mut errors = Vec::new();
        self.paths("", &mut |key, path: &mut PathBuf| match path.to_str().map(expand) {
            Some(Ok(expanded)) => *path = PathBuf::from(expanded),
            Some(Err(error)) => errors.push((key.split('.').map(str::to_owned).collect(), error)),
            None => {}
        });
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::super::load_text;
    use super::*;
    use std::path::Path;

    const CONFIG: &str = "output_dir: ~/1
model: {path: ~/2}
adapter: {start_from: ~/3}
data:
  cache_dir: ~/4
  train: [{path: [~/5, ~/6], image_root: ~/7}, {dataset_info: ~/8#a}]
  eval: [{path: ~/9}]
";

    #[test]
    fn every_path_is_expanded() {
        let mut config: RunConfig = load_text(Path::new("a.yaml"), CONFIG).unwrap();
        let expand = |path: &str| Ok::<_, ()>(path.replace('~', "/u/ada"));
        assert_eq!(config.expand_paths(&expand), []);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(text.matches("/u/ada/").count(), 9, "{text}");
        assert!(!text.contains('~'), "{text}");
    }

    #[test]
    fn escaped_paths_are_read_as_they_were() {
        let mut config: RunConfig = load_text(Path::new("a.yaml"), CONFIG).unwrap();
        config.output_dir = "a$b$$c".into();
        let escaped = config.with_escaped_paths();
        assert_eq!(escaped.output_dir, Path::new("a$$b$$$$c"));
        assert_eq!(escaped.model.path, Path::new("./~/2"));
        let read = escaped.with_unescaped_paths();
        assert_eq!(read.output_dir, config.output_dir);
        assert_eq!(read.with_escaped_paths(), escaped);
    }

    #[test]
    fn an_error_has_the_keys_of_its_path_and_hides_no_other_one() {
        let mut config: RunConfig = load_text(Path::new("a.yaml"), CONFIG).unwrap();
        let expand = |path: &str| match path {
            "~/2" => Err(2),
            "~/7" => Err(7),
            path => Ok(path.replace('~', "/u")),
        };
        let errors = config.expand_paths(&expand);
        let errors: Vec<_> =
            errors.into_iter().map(|(keys, error)| (keys.join("."), error)).collect();
        let expected = [("model.path", 2), ("data.train.0.image_root", 7)];
        assert_eq!(errors, expected.map(|(keys, error)| (keys.to_owned(), error)));
        assert_eq!(config.data.eval[0].path.paths(), [Path::new("/u/9")]);
    }
}
