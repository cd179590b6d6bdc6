import Foundation
import LocalTokenizers
import MLXH2O
import MLXLLM
import MLXLMCommon

// Chat MODEL_FOLDER [TOKENS]: a conversation in the memory of so many tokens.
let arguments = CommandLine.arguments
guard arguments.count > 1, let tokens = Int(arguments.count > 2 ? arguments[2] : "1024") else {
    print("usage: Chat MODEL_FOLDER [TOKENS]")
    exit(2)
}
let folder = URL(fileURLWithPath: arguments[1])
let profile = try? H2OProfile(contentsOf: folder.appendingPathComponent(H2OProfile.fileName))
let configuration = try H2OConfiguration(
    budget: .tokens(tokens), headBudgets: profile.map { .matching([$0]) } ?? .uniform)
await H2OModels.register(configuration)
let container = try await LLMModelFactory.shared.loadContainer(
    from: folder, using: LocalTokenizers())
let session = H2OChatSession(
    container, h2o: configuration,
    parameters: GenerateParameters(maxTokens: 500, temperature: 0.6))

/// At once, and not when the line is whole.
func write(_ text: String) { FileHandle.standardOutput.write(Data(text.utf8)) }

while true {
    write("> ")
    guard let message = readLine(), !message.isEmpty else { break }
    var speed = 0.0
    for try await part in session.streamDetails(to: message) {
        write(part.chunk ?? "")
        speed = part.info?.tokensPerSecond ?? speed
    }
    let bytes = await session.withCaches { H2OKVCache.describe($0).reduce(0) { $0 + $1.nbytes } }
    print("\n[\(bytes / 1024) KB, \(String(format: "%.1f", speed)) tokens/s]")
}
