import Foundation
import MLXLMCommon
import Testing

@testable import MLXH2O

/// What the docs show can be pasted.
@Suite struct DocsTests {
    private func text(_ path: String) throws -> String {
        try String(contentsOf: checkout.appendingPathComponent(path), encoding: .utf8)
    }

    /// The page's first example is the file FirstExample.swift, which is compiled with the tests.
    @Test func theFirstExampleIsCompiled() throws {
        let parts = try text("docs/reference/swift.md").components(separatedBy: "```swift\n")
        let example = try #require(parts.dropFirst().first).components(separatedBy: "```")[0]
        #expect(try example == text("swift/Tests/MLXH2OTests/FirstExample.swift"))
    }

    /// In a stock model, where the library takes a policy of keys and says so.
    @Test func theFirstExampleRuns() async throws {
        let container = try ChatSessionTests().container(stock: true, script: Script(["rome"]))
        #expect(try await answer("what is it", with: container) == "rome")
    }
}
