import ChatEngine
import Foundation
import MLXH2O

// Chat MODEL_FOLDER [TOKENS]: a conversation in the memory of so many tokens.
let arguments = CommandLine.arguments
guard arguments.count > 1, let tokens = Int(arguments.count > 2 ? arguments[2] : "1024") else {
    print("usage: Chat MODEL_FOLDER [TOKENS]")
    exit(2)
}
let folder = URL(fileURLWithPath: arguments[1])
let profile = try? H2OProfile(contentsOf: folder.appendingPathComponent(H2OProfile.fileName))
let engine = try await ChatEngine(
    folder: folder, tokenizers: LocalTokenizers(),
    configuration: H2OConfiguration(
        budget: .tokens(tokens), headBudgets: profile.map { .matching([$0]) } ?? .uniform))
while true {
    FileHandle.standardOutput.write(Data("> ".utf8))
    guard let message = readLine(), !message.isEmpty else { break }
    let last = Last()
    try await engine.answer(message) { frame in
        // At once, and not when the line is whole.
        FileHandle.standardOutput.write(Data(frame.text.utf8))
        last.frame = frame
    }
    if let frame = last.frame {
        let speed = String(format: "%.1f", frame.tokensPerSecond)
        print("\n[\(frame.tokens) tokens so far, \(frame.nbytes / 1024) KB, \(speed) tokens/s]")
    }
}

final class Last: @unchecked Sendable {
    var frame: ChatEngine.Frame?
}
