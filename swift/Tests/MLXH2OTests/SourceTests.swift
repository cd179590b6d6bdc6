import Foundation
import Testing

/// How the sources are to read (CONTRIBUTING.md).
@Suite struct SourceTests {
    private static let mostLinesOfAFunction = 60
    private static let mostLinesOfAType = 300

    /// The package's files by name, as lines.
    private func files() throws -> [String: [Substring]] {
        let folder = checkout.appendingPathComponent("swift/Sources/MLXH2O")
        let names = try #require(FileManager.default.enumerator(atPath: folder.path))
        var files: [String: [Substring]] = [:]
        for case let name as String in names where name.hasSuffix(".swift") {
            let url = folder.appendingPathComponent(name)
            files[name] = try String(contentsOf: url, encoding: .utf8)
                .split(separator: "\n", omittingEmptySubsequences: false)
        }
        return files
    }

    @Test func functionsAndTypesAreShort() throws {
        let files = try files()
        #expect(files.count > 40)
        for (name, lines) in files {
            for (kind, first, count) in Self.declarations(lines) {
                let most =
                    kind == "func" || kind == "init"
                    ? Self.mostLinesOfAFunction : Self.mostLinesOfAType
                #expect(count <= most, "\(name):\(first + 1): \(count) lines")
            }
        }
    }

    @Test func longDeclarationsAreFound() {
        let long =
            ["    func f(", "        x: Int", "    ) {"] + Array(repeating: "", count: 58) + [
                "    }"
            ]
        let declarations = Self.declarations((["struct S {"] + long + ["}"]).map { Substring($0) })
        #expect(
            declarations.map(\.kind) == ["struct", "func"] && declarations.map(\.count) == [64, 62])
    }

    @Test func commentsSayWhatAndNotWho() throws {
        for (name, lines) in try files() {
            let text = lines.joined(separator: "\n").lowercased()
            for word in ["nobody", "somebody", "whoever"] {
                #expect(!text.contains(word), "\(name): \(word)")
            }
        }
    }

    /// Functions and types of more than one line: the first line, and how many there are.
    private static func declarations(
        _ lines: [Substring]
    ) -> [(kind: String, first: Int, count: Int)] {
        let kinds: Set<Substring> = ["func", "init", "class", "struct", "enum", "extension"]
        return lines.indices.compactMap { first in
            guard lines[first].hasSuffix("{") || lines[first].hasSuffix("(") else { return nil }
            let indent = lines[first].prefix { $0 == " " }
            let words = lines[first].split { !$0.isLetter }
            // Modifiers come before what is declared.
            let declared = words.first { kinds.contains($0) }
            guard let declared,
                words.prefix(while: { $0 != declared }).allSatisfy(modifiers.contains),
                lines[first].first(where: { $0 != " " })?.isLetter == true,
                let last = lines[first...].firstIndex(of: indent + "}")
            else { return nil }
            return (String(declared), first, last - first + 1)
        }
    }

    private static let modifiers: Set<Substring> = [
        "public", "private", "fileprivate", "internal", "static", "final", "convenience",
        "mutating", "indirect", "override", "open",
    ]
}
