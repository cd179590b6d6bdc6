/// Stop with a message unless the condition holds.
///
/// For what a protocol or an attention without errors cannot throw. In release builds too, where
/// `precondition` ends the process without a word.
func require(
    _ condition: Bool, _ message: @autoclosure () -> String, file: StaticString = #file,
    line: UInt = #line
) {
    if !condition { fatalError(message(), file: file, line: line) }
}
